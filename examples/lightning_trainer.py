"""Fit a regression with Lightning and publish it every 50 steps to a worker in this process.

python examples/lightning_trainer.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer

import weightbus
from weightbus.python_client.training.lightning import PublishWeights


class Line(LightningModule):
    """y = 2 x + 1"""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, x: torch.Tensor, _index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return torch.nn.functional.mse_loss(self.net(x), 2 * x + 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and predict with the version that the worker runs."""
    replica = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.rand(6400, 1), batch_size=16)  # type: ignore[var-annotated, arg-type]  # pyright: ignore[reportArgumentType]
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, {"line": replica}) as worker,
    ):
        worker.start()
        publish = PublishWeights(publisher, "line", every=50, part=lambda module: module.net)
        Trainer(max_epochs=1, callbacks=[publish], logger=False, enable_checkpointing=False).fit(
            Line(), data
        )
        with worker.reading():
            predicted = replica(torch.tensor([3.0])).item()
        print(f"version {worker.version('line')}: f(3) = {predicted:.1f}")


if __name__ == "__main__":
    main()
