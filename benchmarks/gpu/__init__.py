"""One GPU: transfers, kernels, pinned rings and the prefetcher beside peers."""
