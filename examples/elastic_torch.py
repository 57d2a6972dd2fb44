"""Train a PyTorch model on CPUs with ranks that join and leave, without a change of its loss curve.

    gpubroker submit examples.elastic_torch:train -i steps=200 --bundle count=4,cpu=1 --min-ranks 1

In each step every rank computes the gradient of its share of the data, and all add up their shares by gloo.
So a step is the same whichever ranks do it. Rank 0, which never leaves, says before each step whether the
ranks change: then they meet in a new group and go on with its weights. A step that fails because a rank is
gone is done again.
"""

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from gpubroker import Stopped, current_task

MEETING_SECONDS = 60.0
RATE = 0.1
ROWS = 480


def train(steps: int, pause_seconds: float = 0.0) -> dict[str, list[float] | list[int]]:
    """Train the model, in each rank of the task. Rank 0 returns the loss before each step, and the number of
    ranks that made the step."""
    task = current_task()
    meetings = Meetings()
    model, first, losses, sizes = model_of(0), 0, [], []
    if task.resume_state is not None:
        weights, losses, sizes = task.resume_state
        model.load_state_dict(weights)
        first = len(losses)
    step, is_together = first, False
    while step < steps:
        if task.rank == 0 and task.should_stop:
            raise Stopped
        try:
            if not is_together:
                step = meetings.meet(model, step)
            is_together = not meetings.is_resized()
            if not is_together:
                continue
            loss, gradients = all_together(model, *share_of(meetings.position, len(meetings.ranks)))
        except RuntimeError as fault:
            if task.should_stop:
                raise Stopped from fault
            print(f"step {step} is done again: {str(fault).splitlines()[0][:100]}", flush=True)
            is_together = False
            task.wait_for_stop(1.0)  # news of a lost rank may arrive a moment later
            continue
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= RATE * gradient
        step += 1
        if task.rank == 0:
            losses, sizes = [*losses, loss], [*sizes, len(meetings.ranks)]
            task.checkpoint((model.state_dict(), losses, sizes))
            task.progress(step / steps, f"loss {loss:.4f} with ranks {meetings.ranks}")
            task.wait_for_stop(pause_seconds)
    meetings.leave()
    return {"losses": losses, "sizes": sizes}


class Meetings:
    """Forms groups of the ranks at work. The ranks meet in a store of rank 0, which writes the invitations of
    each rank there, one after the other."""

    def __init__(self) -> None:
        self._task = current_task()
        host, _, port = self._task.rank_zero_address.rpartition(":")
        self._store = dist.TCPStore(
            host.strip("[]"),
            int(port),
            is_master=self._task.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
        self._sent: dict[int, int] = {}
        """Rank -> the number of invitations that it was sent."""
        self._read = 0
        self.ranks: list[int] = []

    @property
    def position(self) -> int:
        return self.ranks.index(self._task.rank)

    def meet(self, model: torch.nn.Module, step: int) -> int:
        """Form a new group with the weights of rank 0, and return its step. Raises Stopped in a rank that is
        not to be in the group."""
        self.leave()
        if self._task.rank == 0:
            self._invite(list(self._task.accept_world()))
        group, self.ranks = self._newest_invitation()
        if self._task.rank not in self.ranks:
            raise Stopped
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group {group}", self._store),
            rank=self.position,
            world_size=len(self.ranks),
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
        where = torch.tensor([step])
        for values in (where, *(weight.data for weight in model.parameters())):
            dist.broadcast(values, 0)
        print(f"rank {self._task.rank} goes on at step {int(where)} with ranks {self.ranks}", flush=True)
        return int(where)

    def is_resized(self) -> bool:
        """Return whether ranks have joined or are to leave, as rank 0 knows."""
        news = torch.tensor([float(self._task.world_changed)])
        dist.broadcast(news, 0)
        return bool(news)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _invite(self, ranks: list[int]) -> None:
        """Invite these ranks, and tell the others to leave."""
        group = 1 + self._sent.get(0, 0)
        for rank in {*ranks, *self.ranks}:
            self._sent[rank] = 1 + self._sent.get(rank, 0)
            self._store.set(f"{rank}/{self._sent[rank]}", json.dumps([group, ranks]))

    def _newest_invitation(self) -> tuple[int, list[int]]:
        """Return the number of the newest group, and its ranks."""
        self._read += 1
        invitation = self._store.get(f"{self._task.rank}/{self._read}")
        while self._store.check([f"{self._task.rank}/{self._read + 1}"]):
            self._read += 1
            invitation = self._store.get(f"{self._task.rank}/{self._read}")
        group, ranks = json.loads(invitation)
        return group, ranks


def all_together(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[float, list[torch.Tensor]]:
    """Return the loss and the gradients over the shares of all ranks. Changes no weight."""
    model.zero_grad()
    loss = ((model(x) - y) ** 2).sum() / ROWS
    loss.backward()
    parts = [loss.detach().reshape(1), *(weight.grad.flatten() for weight in model.parameters())]
    everything = torch.cat(parts)
    dist.all_reduce(everything)
    loss_of_all, *gradients = everything.split([part.numel() for part in parts])
    shapes = [weight.shape for weight in model.parameters()]
    return float(loss_of_all), [part.reshape(shape) for part, shape in zip(gradients, shapes, strict=True)]


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def share_of(position: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every `size`-th row of the data, which is the same in each rank."""
    x = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    return x[position::size], y[position::size]
