"""Train a layer whose heads are kept from doing the same, then compile what was trained, and hold it against float64.

The task: each token is to know the one before it and the first of its sequence, through noise. Trained on the task
alone, heads share the work in whatever way comes first. With `analysis.HeadDiversity` beside the task's loss they have
less than half as much to tell about each other, and the task is done as well. The exit code is 1 if not, or if what was
compiled is over its error budget.

Run it with: python examples/train_heads.py (seconds)
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile import analysis

D, H, L, BATCH = 32, 4, 24, 16
STEPS, TESTED = 400, 64
NOISE = 0.3
PENALTY = 0.03
"""The weight of a nat between two heads, beside the task's squared error."""

console = Console()


class Task:
    """Sequences of random tokens with their places, and what each token should come to know; `drawn` says which."""

    def __init__(self, drawn: int = 0) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._tokens = self._normal(8, D)
        self._places = self._normal(L, D)
        self._before, self._first = self._normal(D, D) / D**0.5, self._normal(D, D) / D**0.5
        self._random.manual_seed(drawn)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """x and what y should be, (size, L, D)."""
        tokens = self._tokens[torch.randint(8, (size, L), generator=self._random)]
        wanted = tokens.roll(1, dims=1) @ self._before + tokens[:, :1] @ self._first
        return (tokens + self._places), wanted + NOISE * self._normal(size, L, D)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)


def train(penalty: float) -> mhsa.MultiHeadAttention:
    """A layer trained on the task, with the information between its heads weighted by `penalty`."""
    torch.manual_seed(0)
    spec = mhsa.AttentionSpec(embed_dim=D, num_heads=H, outputs=("y", "heads"))
    layer, task = mhsa.MultiHeadAttention(spec, dropout=0.05), Task()
    diversity = analysis.HeadDiversity("information", weight=penalty)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        x, wanted = task.batch(BATCH)
        y, heads = layer(x)
        loss = nn.functional.mse_loss(y, wanted) + diversity(heads)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return layer.eval()


@torch.no_grad()
def tested(layer: mhsa.MultiHeadAttention) -> tuple[float, float]:
    """The task's loss, and the information between two heads in the mean, in nats, on sequences never seen."""
    looking = layer.with_outputs("y", "heads", "weights")
    x, wanted = Task(drawn=1).batch(TESTED)
    outputs = looking(x)
    report = analysis.HeadStatistics(looking).add(x, outputs).report()
    pairs = torch.triu_indices(H, H, 1)
    information = float(report.information[pairs[0], pairs[1]].mean())
    return nn.functional.mse_loss(outputs[0], wanted).item(), information


def main() -> int:
    torch.set_num_threads(1)  # of so small a layer each operation is done before a second thread would have begun
    console.rule("[bold]Heads that are trained to differ, compiled")
    started = time.perf_counter()
    plain, diverse = train(0.0), train(PENALTY)
    console.print(f"trained twice, {STEPS} steps each ({time.perf_counter() - started:.0f} s)")
    (loss, information), (loss_diverse, information_diverse) = tested(plain), tested(diverse)
    artifact = mhsa.compile(diverse.with_outputs("y"))
    verdict = mhsa.verify(artifact)
    table = Table("", "the task alone", "with the penalty", "by")
    table.add_row("task's loss", f"{loss:.4f}", f"{loss_diverse:.4f}", f"{loss_diverse / loss:.3f}")
    ratio = information_diverse / information
    table.add_row("nats between two heads", f"{information:.3f}", f"{information_diverse:.3f}", f"{ratio:.3f}")
    console.print(table)
    console.print(f"compiled, and within its error budget of float64: {verdict.ok}")
    return 0 if ratio <= 0.5 and loss_diverse <= 1.05 * loss and verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
