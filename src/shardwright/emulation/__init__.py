"""Scripts written for GPUs run on a machine without one: `shardwright run --emulate-cuda`.

Every tensor is on the CPU and says so. What names a CUDA device is read as the CPU where it reaches torch
(`arguments`), and the functions of `torch.cuda` answer as if there were devices (`cuda_functions`). Values are those of
the same script on the CPU. `config.emulation` says whether all this is wanted, `startup` when it begins, `install` puts it
in place.
"""
