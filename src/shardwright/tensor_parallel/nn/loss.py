"""Cross entropy over logits whose vocabulary is split over the tp ranks, without gathering them.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the idea); the log-sum-exp of the vocabulary is that of the
ranks' own, so one small exchange is enough.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.transport import differentiable as comm

IGNORED: Final = -100
"""The label of tokens that don't count."""


def token_losses(logits: Tensor, labels: Tensor, start: int, *, reuse_logits: bool = False) -> Tensor:
    """Return the cross entropy of each token, equal on all tp ranks; without meaning where the label is `IGNORED`.

    Called by: every rank of the tp group.
    Collectives: one all-gather of two numbers per token forward, none backward.
    logits: [..., own vocabulary].   labels: [...], equal on all ranks.   start: first id of the own vocabulary.
    reuse_logits: the memory of `logits` may be overwritten: nobody else reads them.
    Gradient: equal in; that of this rank's logits out.
    """
    losses: Tensor = _TokenLosses.apply(logits.view(-1, logits.shape[-1]), labels.reshape(-1), start, reuse_logits)
    return losses.view(labels.shape)


def mean_loss(losses: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the tokens that count, as `nn.functional.cross_entropy` does."""
    counts = labels != IGNORED
    return torch.where(counts, losses, losses.new_zeros(())).sum() / counts.sum()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The same of logits that are whole: the mean over tokens that count. logits: [..., V].   labels: [...]."""
    return nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORED
    )


def next_tokens(labels: Tensor) -> Tensor:
    """Return for each position the label of the next one; the last position has none. labels: [B, S]."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, reuse: bool) -> Tensor:
        scores = logits.detach().float()
        local = labels - start
        own = (local >= 0) & (local < scores.shape[1])
        local = local.masked_fill(~own, 0).unsqueeze(1)
        target = scores.gather(1, local).squeeze(1).masked_fill_(~own, 0.0)
        highest = scores.amax(1)
        # on the CPU softmax works row by row and may write where it reads
        shares = torch.softmax(scores, 1, out=scores if reuse and scores.is_cpu else None)
        log_sum = highest - shares.amax(1).log_()  # the share of the highest is exp(highest - log_sum)
        log_sums, targets = comm.gathered(torch.stack((log_sum, target))).unbind(1)  # [tp, N] each
        total = torch.logsumexp(log_sums, 0)
        ctx.save_for_backward(shares, local, own, (log_sum - total).exp_())
        ctx.dtype = logits.dtype
        return total - targets.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares, local, own, part = ctx.saved_tensors
        if torch._C._autograd._get_current_graph_task_keep_graph():
            shares = shares.clone()  # else its memory, as large as the logits, becomes the gradient's
        of_logits = shares.mul_((grad * part).unsqueeze(1))
        of_logits.scatter_add_(1, local, -(grad * own).unsqueeze(1))
        return of_logits.to(ctx.dtype), None, None, None
