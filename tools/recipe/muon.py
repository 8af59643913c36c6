"""Muon: an optimizer for weight matrices that orthogonalises the momentum update.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/). Implemented from the description there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# Iterating a·x + b·x³ + c·x⁵ drives singular values in (0, 1] towards 1.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices: singular values become 0.7 to 1.2.

    matrices: (batch, rows, columns), any scale.
    """
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, then `orthogonalise`, batched over all matrices of a shape.

    `parts` is the number of matrices stacked in a parameter's rows (such as q, k and v), each of
    which is orthogonalised separately.
    """

    def __init__(
        self,
        params: Iterable[tuple[Tensor, int]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        pairs = list(params)
        super().__init__(
            [p for p, _ in pairs],
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        )
        self.parts = dict(pairs)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(buffer, momentum)
                p.mul_(1 - lr * decay)
                for part, part_update in zip(
                    p.chunk(self.parts[p]), update.chunk(self.parts[p]), strict=True
                ):
                    by_shape[part_update.shape].append((part, part_update))
            for shape, pairs in by_shape.items():
                updates = orthogonalise(torch.stack([part_update for _, part_update in pairs]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (part, _), update in zip(pairs, updates, strict=True):
                    part.add_(update, alpha=-lr * scale)
