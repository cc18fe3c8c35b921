"""Count the boxes in PIL images of different sizes; stop and resume in mid-epoch."""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from pyparallel import Collate, Concat, DataLoader, Pad, PreDataLoader


class Pictures(Dataset[dict[str, Any]]):
    """Pictures of different sizes, each with up to three white boxes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = Image.new("L", (28 + i % 17, 20 + i % 13))  # width, height
        for box in (boxes := [[9 * k + 2, 5, 9 * k + 6, 10] for k in range(i % 4)]):
            ImageDraw.Draw(image).rectangle(box, fill=255)
        return {"image": image, "boxes": torch.tensor(boxes).reshape(-1, 4)}


if __name__ == "__main__":
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group()
    device = "cpu"  # or torch.device("cuda", dist.get_node_local_rank())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 1))
    model = nn.parallel.DistributedDataParallel(net.to(device))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    sampler: Any = DistributedSampler(data := Pictures())
    rules = Collate(image=Pad(size_divisor=8, mask=True), boxes=Concat())
    loader = DataLoader(data, 4, sampler=sampler, num_workers=2, collate_fn=rules)
    parts: Any = (model, optimizer, batches := PreDataLoader(loader, device))
    step, file = 0, folder / f"rank{sampler.rank}.pt"
    if file.exists():
        step, *states = torch.load(file, map_location=device)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    while step < steps:
        sampler.set_epoch(step // len(batches))
        for batch in islice(batches, steps - step):
            cells = model(batch["image"].data[:, None] / 255)[:, 0]
            found = (cells * batch["image"].mask).sum((1, 2)) / 100
            loss = (found - batch["boxes"].lengths()).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if sampler.rank == 0:
                print(f"step {step}: loss {loss.item()}")
    torch.save([step, *(part.state_dict() for part in parts)], file)
    dist.destroy_process_group()
