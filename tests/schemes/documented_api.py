"""The documented API of the schemes, as a table: what the pages of TorchRL's documentation promise.

One row for each member of each page: the class, the member, and its parameters as documented, with
their defaults. `REQUIRED` stands for a parameter without one; `*args` and `**kwargs` for
themselves. A property has no parameters. The text of the pages is not repeated here.
"""

from dataclasses import dataclass
from typing import Any

REQUIRED = "required"

Parameters = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One documented member of a class.

    Attributes:
        of: The class, by the name that users import.
        name: The member; `__init__` for the constructor.
        parameters: Name and default of each parameter that may be given by position or keyword.
        keywords: The same of those that are given by keyword only.
        kind: "method", "property" or "classmethod"; "hook" is a method whose parameters the pages
            do not give.
    """

    of: str
    name: str
    parameters: Parameters = ()
    keywords: Parameters = ()
    kind: str = "method"

    def __str__(self) -> str:
        return f"{self.of}.{self.name}"


WEIGHTS = ("weights", None)
WORKERS = ("worker_ids", None)
MODEL_ID = ("model_id", REQUIRED)
CONTEXT = ("context", None)
ANY = ("**kwargs", REQUIRED)
PREPARE = (("weights", REQUIRED), MODEL_ID, ("strategy", REQUIRED), CONTEXT)


def _older(of: str, strategy: str) -> list[Member]:
    """What both pages of the older API of schemes document."""
    return [
        Member(of, "__init__", (("strategy", strategy),)),
        Member(of, "create_receiver"),
        Member(of, "create_sender"),
        Member(of, "create_transport", (("pipe_or_context", REQUIRED),)),
        Member(of, "get_receiver"),
        Member(of, "get_sender"),
        Member(of, "init_on_sender", (MODEL_ID, CONTEXT, ANY)),
        Member(of, "init_on_worker", (MODEL_ID, CONTEXT, ANY)),
        Member(of, "prepare_weights", PREPARE),
    ]


def _newer(of: str) -> list[Member]:
    """What the page of NoWeightSyncScheme documents, which all schemes of its API share."""
    return [
        Member(of, "__init__", (("strategy", "tensordict"),)),
        Member(of, "apply_weights", (("weights", REQUIRED), ("inplace", True))),
        Member(of, "connect", (), (("worker_idx", None),)),
        Member(of, "context", kind="property"),
        Member(of, "create_transport", (ANY,)),
        Member(of, "init_on_receiver", (), (MODEL_ID, CONTEXT, ANY)),
        Member(of, "init_on_sender", (("*args", REQUIRED), ANY)),
        Member(of, "model", kind="property"),
        Member(of, "model_id", kind="property"),
        Member(of, "prepare_weights", PREPARE),
        Member(of, "receive", (("timeout", None),)),
        Member(of, "receiver_transport", kind="property"),
        Member(of, "send", (WEIGHTS, WORKERS)),
        Member(of, "sender_transports", kind="property"),
        Member(of, "shared_transport", kind="property"),
        Member(of, "shutdown"),
        Member(of, "weights", kind="property"),
        Member(of, "worker_idx", kind="property"),
    ]


DOCUMENTED: list[Member] = [
    *_newer("NoWeightSyncScheme"),
    *_older("RPCWeightSyncScheme", "state_dict"),
    *_older("RayModuleTransformScheme", "tensordict"),
    Member("WeightSender", "__init__", (("scheme", REQUIRED),)),
    Member("WeightSender", "send", (WEIGHTS, WORKERS)),
    Member("WeightSender", "send_async", (WEIGHTS, WORKERS)),
    Member("WeightSender", "update_weights", (("weights", REQUIRED),)),
    Member("WeightSender", "wait_async"),
    Member(
        "RayWeightUpdater",
        "__init__",
        (("policy_weights", REQUIRED), ("remote_collectors", REQUIRED), ("max_interval", 0)),
    ),
    Member("RayWeightUpdater", "all_worker_ids"),
    Member("RayWeightUpdater", "_get_server_weights", kind="hook"),
    Member("RayWeightUpdater", "_maybe_map_weights", kind="hook"),
    Member("RayWeightUpdater", "_sync_weights_with_worker", kind="hook"),
    Member("RayWeightUpdater", "_skip_update", kind="hook"),
    Member("RayWeightUpdater", "collector", kind="property"),
    Member("RayWeightUpdater", "from_policy", (("policy", REQUIRED),), kind="classmethod"),
    Member("RayWeightUpdater", "increment_version"),
    Member("RayWeightUpdater", "init", (("*args", REQUIRED), ANY)),
    Member("RayWeightUpdater", "post_hooks", kind="property"),
    Member("RayWeightUpdater", "push_weights", (("policy_or_weights", None), WORKERS)),
    Member("RayWeightUpdater", "register_collector", (("collector", REQUIRED),)),
    Member("RayWeightUpdater", "register_post_hook", (("hook", REQUIRED),)),
]

SCHEMES = [
    "ZMQWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "RayModuleTransformScheme",
]

# Both vintages are there on every scheme; how a scheme is constructed differs.
BOTH_VINTAGES: list[Member] = [
    member
    for scheme in SCHEMES
    for member in (*_newer(scheme), *_older(scheme, ""))
    if member.name != "__init__"
]
