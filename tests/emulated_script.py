"""A training script as people write them for GPUs: the API of the original, and CUDA calls. Started by tests."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import smdistributed.modelparallel.torch as smp


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("scale", torch.full((32,), 0.5, device="cuda"))

    def forward(self, x):
        ones = torch.ones(x.shape[-1], device=torch.device("cuda", torch.cuda.current_device()))
        return x + self.b(torch.relu(self.a(x))) * self.scale * ones


def build():
    return nn.Sequential(nn.Linear(16, 32), *[Block() for _ in range(4)], nn.Linear(32, 4))


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)


@smp.step
def train_step(model, scaler, x, y):
    with torch.cuda.amp.autocast(enabled=scaler.is_enabled()):
        out = model(x)
    loss = nn.functional.cross_entropy(out.float().cuda(), y.to("cuda")) + torch.zeros((), device=x.device)
    model.backward(scaler.scale(loss))
    return loss


def main():
    smp.init({"microbatches": 2, "ddp": True})
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == smp.local_size()
    torch.cuda.set_device(smp.local_rank())
    assert torch.cuda.current_device() == smp.local_rank()
    device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(1 + smp.rank())
    with smp.tensor_parallelism():
        model = build().to(device)
    model = smp.DistributedModel(model).cuda()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scaler = smp.amp.GradScaler(enabled=False)
    samples = TensorDataset(*data())
    loader = DataLoader(
        samples,
        batch_size=8,
        pin_memory=True,
        num_workers=1,
        sampler=DistributedSampler(samples, smp.dp_size(), smp.dp_rank(), shuffle=False),
    )
    start, end, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
    torch.cuda.reset_peak_memory_stats()
    for number, (x, y) in enumerate(loader):
        start.record()
        with torch.cuda.stream(stream):
            x = x.pin_memory().cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        x.record_stream(stream)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, scaler, x, y).reduce_mean()
        scaler.step(optimizer)
        scaler.update()
        end.record()
        torch.cuda.synchronize()
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        if smp.rank() == 0:
            assert start.elapsed_time(end) > 0
            assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() * 1.1
            print(f"step {number} loss {loss.item() / smp.dp_size()!r}", flush=True)
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
