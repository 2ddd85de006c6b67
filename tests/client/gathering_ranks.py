"""One of the ranks that publish sharded models with `weightbus.gather`.

    python gathering_ranks.py RANK SIZE FOLDER

Prints a JSON object of what this rank saw: for rank 0 what its worker took, and for all ranks the
errors. One rank ends itself at the end.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import weightbus
from weightbus import Publisher, Settings, Subscriber, WeightBusError
from weightbus.python_client.publishing import gathering
from weightbus.python_client.publishing.ranks import ROUNDS_KEPT, Round

SECONDS = 60.0
SHORT = 1.0  # seconds that ranks wait for one that does not come
DIES = {2: 0, 4: 3}  # the rank that ends itself, by the number of ranks
CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]


class Tied(nn.Module):
    """Two names of one weight; a frozen parameter, buffers, and shapes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5, bias=False))
        self.conv = nn.Conv2d(3, 2, 3)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.inner[0].bias.requires_grad_(False)
        self.register_buffer("lost", torch.ones(2), persistent=False)


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # which is here at once


class Rank:
    """This rank, with what it saw. Rank 0 has a publisher, and a worker that keeps what it took."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.mesh = init_device_mesh("cpu", (size,))
        self.saw: dict[str, Any] = {}
        self.took: Tensors = {}
        self.publisher = Publisher("tcp://127.0.0.1:0") if rank == 0 else None
        self.worker: Subscriber | None = None
        if self.publisher is not None:
            self.worker = Subscriber(self.publisher.address, {"m": self.take}).start()
            self.publisher.wait_for_workers(1, SECONDS)

    def take(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.took = {name: tensor.clone() for name, tensor in pairs}

    def publish(self, model: object, **options: Any) -> Any:
        options = {"timeout": SECONDS} | options
        return weightbus.gather(model, timeout=SECONDS).publish(self.publisher, "m", **options)

    def source(self, model: object) -> Callable[[], object]:
        """Return a function that publishes the model with its values of the moment."""
        source = weightbus.gather(model, timeout=SECONDS)
        return partial(source.publish, self.publisher, "m", timeout=SECONDS)

    def same(self, case: str, model: object, want: Tensors, **options: Any) -> Any:
        """Publish, and note whether the worker has these tensors, in this order, bit for bit."""
        receipt = self.publish(model, **options)
        if self.rank == 0:
            fault = "" if list(self.took) == list(want) else f"the names are {list(self.took)}"
            for name, tensor in want.items():
                if not fault and bits(self.took[name]) != bits(tensor):
                    fault = f"{name} is {self.took[name]}, not {tensor}"
            self.saw[f"same: {case}"] = fault
        return receipt

    def error(self, case: str, does: Callable[[], object]) -> None:
        """Note the error of a call; then all ranks wait for each other in the user's group."""
        try:
            does()
            self.saw[case] = "none"
        except (WeightBusError, ValueError) as error:
            self.saw[case] = f"{type(error).__name__}: {error}"
        dist.barrier()


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    whole = tensor.detach().contiguous()
    return whole.dtype, whole.shape, whole.reshape(-1).view(torch.uint8).tolist()


def wrapped(me: Rank) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same module in each wrapper."""
    yield "plain", tied()
    yield "DDP", nn.parallel.DistributedDataParallel(tied())
    # The compiler takes long to import.
    wrap: Callable[[nn.Module], Any] = compiled if me.size == 2 else lambda module: module
    yield "compiled DDP", wrap(nn.parallel.DistributedDataParallel(tied()))
    for orig in (False, True):
        for sharding in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            made = tied()
            # FSDP1 flattens in the order of the memory; FSDP2 takes no such parameter.
            made.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            # Without `use_orig_params` FSDP1 flattens no frozen parameter beside others.
            made.inner[0].bias.requires_grad_(not orig)
            options: Any = {"device_id": CPU, "use_orig_params": orig}
            options["sharding_strategy"] = sharding
            if sharding is ShardingStrategy.FULL_SHARD:
                inner: Any = wrap(FullyShardedDataParallel(made.inner, **options))
                made.inner = inner
            yield f"FSDP1, {orig=}, {sharding}", FullyShardedDataParallel(made, **options)
    made = tied()
    for part in (made.inner, made):
        fully_shard(part, mesh=me.mesh)
    yield "FSDP2", made
    one = tied()
    fully_shard(one, mesh=me.mesh)
    yield "compiled FSDP2", wrap(one)


def wrappers(me: Rank) -> None:
    want = tied().state_dict()
    for case, module in wrapped(me):
        me.same(case, module, want)
    gathered = weightbus.gather(made_once(me), timeout=SECONDS)
    if me.rank == 0:
        me.saw["aliases"] = gathered.state().aliases


def made_once(me: Rank) -> nn.Module:
    made = tied()
    fully_shard(made, mesh=me.mesh)
    return made


def after_steps(me: Rank) -> None:
    """Each publish has the values of its moment, also where a forward pass has gathered some."""
    made, alone = two_layers(), two_layers()
    for part in (made[0], made):
        fully_shard(part, mesh=me.mesh, reshard_after_forward=False)
    flat = FullyShardedDataParallel(
        two_layers(), device_id=CPU, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    )
    again = me.source(made)
    for step in range(2):
        modules: list[Any] = [made, flat, alone]
        for module in modules:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            module(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                module(torch.ones(2, 6))
        want = alone.state_dict()
        again()
        if me.rank == 0:
            close = all(torch.allclose(me.took[name], want[name]) for name in want)
            me.saw[f"same: FSDP2 after step {step}"] = "" if close else "other values"
        me.publish(flat)
        if me.rank == 0:
            close = all(torch.allclose(me.took[name], want[name]) for name in want)
            me.saw[f"same: FSDP1 after step {step}"] = "" if close else "other values"


def placements(me: Rank) -> None:
    """Every placement of every shape, on meshes of one and two dimensions, in any order of ranks.

    In some orders torch puts shards elsewhere than the mesh says; what counts is `full_tensor()`.
    """
    meshes = [me.mesh, DeviceMesh("cpu", [*reversed(range(me.size))])]
    if me.size == 4:
        meshes += [init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [[0, 2], [1, 3]])]
        meshes += [DeviceMesh("cpu", [[3, 1], [0, 2]])]
    for number, mesh in enumerate(meshes):
        shards: dict[str, object] = {"plain": torch.full((2,), float(me.rank))}
        want: Tensors = {"plain": torch.zeros(2)}
        for shape in [(4, 4), (5, 3, 2), (1, 7), (0, 3)]:
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
            kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for many in product(kinds, repeat=mesh.ndim):
                name = f"{shape} {many}"
                shards[name] = placed = distribute_tensor(whole, mesh, many)
                want[name] = placed.full_tensor()
                assert mesh.mesh.tolist() != sorted(mesh.mesh.tolist()) or want[name].equal(whole)
        scalar = torch.tensor(2.5, dtype=torch.float64)
        shards["scalar"] = distribute_tensor(scalar, mesh, [Replicate()] * mesh.ndim)
        want["scalar"] = scalar
        ones = DTensor.from_local(torch.ones(3, 2), mesh, [Partial()] * mesh.ndim)
        shards["partial"], want["partial"] = ones, torch.full((3, 2), float(me.size))
        me.same(f"placements {number}", shards, want)


def two_ways(me: Rank) -> None:
    """Tensor parallelism, alone and with FSDP2 and HSDP."""
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (me.size // 2, 2), mesh_dim_names=("dp", "tp"))
    made = parallelize_module(two_layers(), mesh["tp"], plan)
    me.same("tensor parallel", made, two_layers().state_dict())
    fully_shard(made, mesh=mesh["dp"])
    me.same("tensor parallel in FSDP2", made, two_layers().state_dict())
    both = two_layers()
    fully_shard(both, mesh=mesh)
    me.same("HSDP", both, two_layers().state_dict())


def options(me: Rank) -> None:
    """A dtype and other names; buffers keep their dtype; lost values are counted."""
    made = tied()
    with torch.no_grad():
        made.embed.weight[6, 4] = 1e30
        large: Any = made.inner[2].weight
        large.fill_(-1e30)
    parameters = {id(parameter) for parameter in made.parameters()}
    want = {
        f"a.{name}": tensor.half() if id(tensor) in parameters else tensor
        for name, tensor in made.state_dict(keep_vars=True).items()
    }
    fully_shard(made, mesh=me.mesh)
    settings = Settings(dtype="float16", rename={"": "a."})
    receipt = me.same("converted and renamed", made, want, settings=settings)
    if me.rank == 0:
        me.saw["lost"] = receipt.detail
    source = weightbus.gather(made, timeout=SECONDS)
    if me.publisher is None:
        source.send()
    else:
        me.publisher.prepare("other", source)
        began = me.publisher.publish_async("other", source, timeout=SECONDS)
        me.saw["async"] = str(began.result(SECONDS).version)
    future = source.publish_async(me.publisher, "other", timeout=SECONDS)
    me.saw["async of the source"] = None if future is None else future.result(SECONDS).version


def refused(me: Rank) -> None:
    """Errors before anything is gathered; after each, the same call succeeds."""
    last = me.size - 1
    made = made_once(me)
    soon = weightbus.gather(made, timeout=SHORT)

    def again(case: str) -> None:
        me.same(f"after {case}", made, tied().state_dict())

    def calls(rank: int) -> Callable[[], object]:
        return lambda: None if me.rank == rank else soon.publish(me.publisher, "m")

    for case, rank in (("the last rank does not call", last), ("rank 0 does not call", 0)):
        me.error(case, calls(rank))
        again(case)
    others: dict[str, dict[str, object]] = {
        "a name": {"x": torch.ones(2), "z": torch.ones(1)},
        "a shape": {"x": torch.ones(3), "y": torch.ones(1)},
        "a dtype": {"x": torch.ones(2), "y": torch.ones(1).half()},
        "shards": {"x": distribute_tensor(torch.ones(2), me.mesh, [Shard(0)]), "y": torch.ones(1)},
        "what cannot travel": {"x": torch.ones(2).to_sparse(), "y": torch.ones(1)},
    }
    usual: dict[str, object] = {"x": torch.ones(2), "y": torch.ones(1)}
    for case, other in others.items():
        me.error(case, partial(me.publish, other if me.rank == last else usual))
    again("different models")
    me.error("rank 0 has a bad argument", lambda: me.publish(usual, commit="never"))
    me.error("rank 0 has what cannot travel", lambda: me.publish(others["what cannot travel"]))
    me.error("rank 0 has no publisher", lambda: weightbus.gather(usual).publish(None, "m"))
    again("rank 0's errors")
    with Publisher("tcp://127.0.0.1:0") as own:
        last_only = me.rank == last
        me.error("another publisher", lambda: own.publish("m", soon) if last_only else None)


def late(me: Rank) -> None:
    """A rank stops in the middle: the others name it in time, and so does it once it goes on."""
    store: Any = vars(dist.distributed_c10d)["_get_default_store"]()
    made, move = made_once(me), moving()

    def waits(*args: Any) -> None:
        if me.rank == me.size - 1:
            store.wait(["go on"], timedelta(seconds=SECONDS))
        move(*args)

    with patch.object(Round, "_move", waits):
        try:
            weightbus.gather(made, timeout=SHORT).publish(me.publisher, "m")
        except WeightBusError as error:
            me.saw["late"] = f"{type(error).__name__}: {error}"
        if me.rank == 0:
            store.set("go on", "")
    dist.barrier()
    me.same("after late", made, tied().state_dict())


def moving() -> Callable[..., None]:
    """Return the method that sends or receives each tensor."""
    found: Callable[..., None] = vars(Round)["_move"]
    return found


def tidy(me: Rank) -> None:
    """Note how many keys two gathers leave in the store."""
    store: Any = vars(dist.distributed_c10d)["_get_default_store"]()
    made, keys = two_layers(), list[int]()
    for _ in range(2 + ROUNDS_KEPT):
        me.publish(made)
        dist.barrier()
        keys.append(store.num_keys() if me.size == 2 else 0)  # a file keeps each key
        dist.barrier()
    me.saw["keys"] = keys[-1] - keys[-3]


def memory(me: Rank) -> None:
    """Note how far the memory rises in a publish, in units of one tensor."""
    if me.worker is not None:
        me.worker.close()
    rows = 1024 * me.size - 1
    one = 4 * 1024 * rows
    model = {
        f"{n}.{dim}": distribute_tensor(torch.ones(rows, 1024), me.mesh, [Shard(dim)])
        for n in range(3)
        for dim in (0, 1)
    }
    me.publish(model)  # allocates the version's memory
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = status("VmRSS")
    me.publish(model)
    me.saw["memory"] = (status("VmHWM") - before) / one


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def dies(me: Rank, rank: int) -> None:
    """A rank ends in the middle of a gather."""
    made, move, moved = two_layers(), moving(), list[object]()
    fully_shard(made, mesh=me.mesh)

    def ends(*args: Any) -> None:
        moved.append(args)
        if me.rank == rank and len(moved) > 1:
            print(json.dumps(me.saw), flush=True)
            os._exit(3)
        move(*args)

    with patch.object(Round, "_move", ends):
        try:
            me.publish(made)
        except WeightBusError as error:
            me.saw["died"] = f"{type(error).__name__}: {error}"


def store_of(rank: int, size: int, folder: Path) -> Any:
    """Return a store in a file; of two ranks, one in the process of rank 0, as torchrun has it."""
    stores: Any = dist
    file = stores.FileStore(str(folder / "store"), size)
    if size > 2:
        return file
    if rank:
        return stores.TCPStore("127.0.0.1", int(file.get("port")), size, is_master=False)
    made = stores.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    file.set("port", str(made.port))
    return made


def begin_group(rank: int, size: int, folder: Path) -> None:
    store = store_of(rank, size, folder)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )


def main(rank: int, size: int, folder: Path) -> None:
    assert gathering.gather is weightbus.gather
    begin_group(rank, size, folder)
    me = Rank(rank, size)
    for case in (wrappers, after_steps, placements, two_ways, options, refused, late, tidy, memory):
        case(me)
    dies(me, DIES[size])
    print(json.dumps(me.saw), flush=True)
    if me.worker is not None and me.publisher is not None:
        me.worker.close()
        me.publisher.close()
    os._exit(0)  # the group has lost a rank, so that it cannot be left


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
