"""Train with Lightning, `SizeBatchSampler` and checkpoints in mid-epoch, or resume.

Arguments: the file for the weights and the number of processes. The checkpoints are in
the folder ``run``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch

from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler

LENGTHS = [1 + 17 * i % 13 for i in range(40)]


class Texts(torch.utils.data.Dataset[Any]):
    """Texts of different lengths, with noise from the random states of a worker."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        ids = torch.full((LENGTHS[index],), 1 + index)
        return {"ids": ids, "noise": torch.rand(())}


class Model(lightning.LightningModule):
    """A sum of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.EmbeddingBag(64, 1, mode="sum", padding_idx=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net(batch["ids"].data)[:, 0] - batch["noise"]
        return found.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    warnings.simplefilter("ignore")
    lightning.seed_everything(0)
    sampler = SizeBatchSampler(LENGTHS, max_padded=30, window=5)
    options: Any = {"num_workers": 2, "sample_seeds": True}
    loader = DataLoader(
        Texts(), batch_sampler=sampler, collate_fn=Collate(ids=Pad()), **options
    )
    saved = lightning.pytorch.callbacks.ModelCheckpoint(
        "run", every_n_train_steps=4, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_steps=22,
        accelerator="cpu",
        strategy="ddp",
        devices=int(sys.argv[2]),
        callbacks=[saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Model()
    saves = sorted(Path("run").glob("*.ckpt"), key=lambda it: it.stat().st_mtime)
    found = saves[-1] if saves else None
    trainer.fit(model, loader, ckpt_path=found)
    if trainer.is_global_zero:
        optimizer = trainer.optimizers[0].state_dict()
        torch.save([trainer.current_epoch, model.state_dict(), optimizer], sys.argv[1])


if __name__ == "__main__":
    main()
