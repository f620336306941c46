"""Checks of `piledriver test`: device, collectives, random numbers and a training step, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.operations import broadcast, gather, gather_object, reduce, scatter
from piledriver.runtime.collectives.split import split_between_processes
from piledriver.runtime.connection import connect, disconnect
from piledriver.runtime.seeds import set_seed, synchronise_rng
from piledriver.runtime.world import World, detect_world


def main() -> None:
    """Run every check, print results on rank 0, and exit with an error if one failed on any rank."""
    world = detect_world()
    connect(world)
    if world.is_main:
        print(world.explain(), flush=True)
    for name, check in checks():
        failure = _try(check, world)
        failures = [(rank, text) for rank, text in enumerate(gather_object(world, failure)) if text]
        if failures:
            raise SystemExit(f"{name}: failed on rank {failures[0][0]}: {failures[0][1]}")
        if world.is_main:
            print(f"{name}: works on {world.size} process(es)", flush=True)
    disconnect()


def checks() -> Iterator[tuple[str, Callable[[World], None]]]:
    """Yield every check with its name."""
    yield "device", _device
    yield "barrier", lambda world: barrier(world)
    yield "gather", _gather
    yield "reduce", _reduce
    yield "broadcast and scatter", _broadcast
    yield "random numbers", _random
    yield "splitting work", _split
    yield "training", _training


def _try(check: Callable[[World], None], world: World) -> str | None:
    try:
        check(world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _device(world: World) -> None:
    matrix = torch.eye(8, device=world.device)
    _expect((matrix @ matrix).sum().item(), 8.0)


def _gather(world: World) -> None:
    got = gather(world, {"rank": torch.tensor([world.rank], device=world.device)})["rank"]
    _expect(got.tolist(), list(range(world.size)))


def _reduce(world: World) -> None:
    _expect(reduce(world, torch.tensor([1.0], device=world.device), "sum").item(), float(world.size))


def _broadcast(world: World) -> None:
    _expect(broadcast(world, torch.tensor([world.rank], device=world.device)).item(), 0)
    part = scatter(world, torch.arange(world.size, device=world.device) if world.is_main else None)
    _expect(part.tolist(), [world.rank])


def _random(world: World) -> None:
    set_seed(0, rank=world.rank)
    synchronise_rng(world, ["torch", "numpy", "python"])
    drawn = gather_object(world, torch.rand(1).item())
    _expect(len(set(drawn)), 1)


def _split(world: World) -> None:
    with split_between_processes(world, list(range(2 * world.size + 1))) as mine:
        _expect(sum(len(share) for share in gather_object(world, mine)), 2 * world.size + 1)


def _training(world: World) -> None:
    """Check that gradients averaged over ranks are the same on every rank."""
    set_seed(0)
    model = torch.nn.Linear(4, 1).to(world.device)
    set_seed(0, rank=world.rank)
    model(torch.randn(8, 4, device=world.device)).square().mean().backward()
    gradient = model.weight.grad
    assert gradient is not None
    averaged = reduce(world, gradient, "mean")
    gathered = gather(world, averaged)
    _expect(bool(torch.equal(gathered[:1], gathered[-1:])), True)


def _expect(got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"got {got}, wanted {wanted}")


if __name__ == "__main__":
    main()
