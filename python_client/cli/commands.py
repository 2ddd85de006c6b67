"""The commands: names, arguments and help texts. Each command runs in the module that has the
command's name.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, Concatenate, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ...bus.limits import Timing
from ...codecs import native
from .. import checks
from ..observing.diagnosis import BEHIND_SECONDS
from ..serving.engines import ENGINES
from ..settings import Encoding
from .bridge import BridgeOptions
from .bridge import bridge as run_bridge
from .doctor import doctor as run_doctor
from .inspect import inspect as run_inspect
from .keygen import keygen as run_keygen
from .outcome import conclude
from .publish import PageOptions, PublishJob
from .publish import publish as run_publish
from .relay import RelayOptions
from .relay import relay as run_relay
from .screen import Screen
from .status import ready as run_ready
from .status import status as run_status
from .subscribe import SubscribeOptions
from .subscribe import subscribe as run_subscribe
from .top import SORTS, Choice
from .top import top as run_top
from .verify import verify as run_verify

P = ParamSpec("P")


class _Command(TyperCommand):
    """A command whose `--help` is shown without a value."""

    def get_help_option(self, ctx: typer.Context) -> TyperOption | None:  # type: ignore[override]
        return _without_value(super().get_help_option(ctx))


class _Commands(TyperGroup):
    """The group of commands, whose `--help` is shown without a value."""

    def get_help_option(self, ctx: typer.Context) -> TyperOption | None:  # type: ignore[override]
        return _without_value(super().get_help_option(ctx))

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the options, after hiding the value of flags, such as those for completion."""
        found = super().get_params(ctx)
        for option in found:
            if isinstance(option, TyperOption) and option.is_flag:
                _without_value(option)
        return found


def _without_value(option: TyperOption | None) -> TyperOption | None:
    if option is not None:
        option.metavar = ""
    return option


app = typer.Typer(
    name="weightbus",
    cls=_Commands,
    help="Publish a model's weights once; every worker applies them, verified.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    bool,
    typer.Option("--json", metavar="", help="Write JSON to stdout; the last line is the result."),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        envvar="WEIGHTBUS_KEYS",
        help="A folder or file made by weightbus keygen.",
    ),
]
Model = Annotated[str, typer.Option("--model", metavar="ID", help="The model's id.")]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A .safetensors file, or a folder of them with its Hugging Face index.",
    ),
]
Address = Annotated[
    str, typer.Argument(metavar="ADDR", help="The address of the publisher, or of a relay.")
]
Addresses = Annotated[
    str,
    typer.Argument(
        metavar="ADDR",
        help="The address of the publisher, or of a relay; or several, separated by commas, "
        "the preferred one first.",
    ),
]
SECONDS_MIN = 0.1


def _seconds(value: float | None) -> float | None:
    try:
        return None if value is None else checks.seconds(value, "seconds")
    except ValueError as error:  # typer accepts "nan" and "inf" as numbers
        raise typer.BadParameter(str(error)) from None


AnswerSeconds = Annotated[
    float,
    typer.Option(
        min=SECONDS_MIN, callback=_seconds, metavar="S", help="Seconds to wait for an answer."
    ),
]


Once = Annotated[
    bool, typer.Option("--once", metavar="", help="End after one version; else run until Ctrl-C.")
]
Silence = Annotated[
    float | None,
    typer.Option(
        min=SECONDS_MIN,
        callback=_seconds,
        metavar="S",
        help="Exit after S seconds without a version. [default: 300 if --once]",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="This worker's name. [default: host and process]"),
]
Metadata = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=TEXT",
        help="Metadata for each version, added to the files' own; repeatable.",
    ),
]
Encoded = Annotated[
    Encoding,
    typer.Option(metavar="HOW", help="For workers that accept patches: raw, delta or auto."),
]
Bind = Annotated[
    str, typer.Option(metavar="ADDR", help="Where workers connect, such as tcp://127.0.0.1:5555.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", metavar="", help="Allow other hosts without keys.")
]
Dashboard = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Serve the dashboard at HOST:PORT.")
]
MetricsAt = Annotated[
    str | None,
    typer.Option("--metrics", metavar="ADDR", help="Serve Prometheus metrics at HOST:PORT."),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="WEIGHTBUS_HTTP_TOKEN",
        metavar="TOKEN",
        help="The token for access to both; better in the environment.",
    ),
]
InsecureHttp = Annotated[
    bool,
    typer.Option("--insecure-http", metavar="", help="Serve them to other hosts without a token."),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightbus {version_of('weightbus')}, {native.description()}")
        raise typer.Exit


def _end_with(
    as_json: bool, work: Callable[Concatenate[Screen, P], int], *args: P.args, **options: P.kwargs
) -> NoReturn:
    """Run a command (`work`) with a screen, and exit with the command's exit code."""
    screen = Screen(as_json)
    raise typer.Exit(conclude(screen, partial(work, screen, *args, **options)))


@app.callback()
def weightbus(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Publish a model's weights once; every worker applies them, verified."""
    del version


@app.command(cls=_Command)
def demo(
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Worker processes.")] = 3,
    seconds: Annotated[
        float,
        typer.Option(min=1, callback=_seconds, metavar="S", help="How long the policy learns."),
    ] = 30.0,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the run into a .png file.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The model that learns: cartpole, or llm, a language model.",
            autocompletion=lambda: ["cartpole", "llm"],
        ),
    ] = "cartpole",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The random seed.")] = 0,
) -> None:
    """Watch a policy learn here while worker processes run its newest weights."""
    # The demo has its own screen, and reports a missing extra itself.
    from ...examples.demo.course import run_demo

    run = partial(run_demo, workers, seconds, plot, as_json, model, seed)
    raise typer.Exit(conclude(Screen(as_json), run))


@app.command(cls=_Command)
def publish(
    path: Checkpoint,
    model: Model,
    bind: Bind,
    expect: Annotated[
        int, typer.Option(min=0, metavar="N", help="Workers to wait for before publishing.")
    ] = 1,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", metavar="", help="Publish again whenever PATH changes, until Ctrl-C."
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            min=SECONDS_MIN,
            callback=_seconds,
            metavar="S",
            help="Seconds for the workers to join and to finish.",
        ),
    ] = 300.0,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Store the latest version there; the next publisher offers it again.",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=_seconds,
            metavar="S",
            help="Seconds to wait for a worker that becomes silent.",
            show_default=f"{Timing().lost_after:g}",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE",
            help="Convert floats to bf16, f16, f32 or f64; PATTERN=DTYPE (repeatable) by name.",
        ),
    ] = None,
    encoding: Encoded = "raw",
    metadata: Metadata = None,
    keys: Keys = None,
    insecure: Insecure = False,
    dashboard: Dashboard = None,
    metrics: MetricsAt = None,
    token: Token = None,
    insecure_http: InsecureHttp = False,
    as_json: Json = False,
) -> None:
    """Publish a checkpoint, and show what every worker did with it."""
    pages = PageOptions(dashboard, metrics, token, insecure_http)
    how = (dtype or (), keys, insecure, pages, encoding, metadata or ())
    order = PublishJob(path, model, bind, expect, watch, timeout, state, grace, *how)
    _end_with(as_json, run_publish, order)


@app.command(cls=_Command)
def relay(
    upstream: Annotated[
        str,
        typer.Argument(
            metavar="UPSTREAM",
            help="The address of the publisher, or of another relay; or several, separated by "
            "commas, the preferred one first.",
        ),
    ],
    model: Annotated[list[str], typer.Option(metavar="ID", help="A model's id; repeatable.")],
    bind: Bind,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="This relay's name. [default: its key's, or host and process]"
        ),
    ] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    dashboard: Dashboard = None,
    metrics: MetricsAt = None,
    token: Token = None,
    insecure_http: InsecureHttp = False,
    as_json: Json = False,
) -> None:
    """Forward models' versions from a publisher to workers, until Ctrl-C."""
    pages = PageOptions(dashboard, metrics, token, insecure_http)
    _end_with(as_json, run_relay, RelayOptions(upstream, bind, model, name, keys, insecure, pages))


@app.command(cls=_Command)
def subscribe(
    address: Addresses,
    model: Model,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The .safetensors file, replaced atomically.")
    ],
    once: Once = False,
    as_json: Json = False,
    timeout: Silence = None,
    name: Name = None,
    keys: Keys = None,
    untied: Annotated[
        bool,
        typer.Option("--untied", metavar="", help="Write tied tensors under each name."),
    ] = False,
) -> None:
    """Write a model's versions into a file as they are published."""
    wanted = SubscribeOptions.of(address, model, once, timeout, name, keys)
    _end_with(as_json, run_subscribe, wanted, out, untied=untied)


@app.command(cls=_Command)
def bridge(
    address: Addresses,
    model: Model,
    server: Annotated[
        list[str], typer.Option(metavar="URL", help="The URL of a server; repeatable.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help=f"The servers' engine: {' or '.join(ENGINES)}.",
            autocompletion=lambda: list(ENGINES),
        ),
    ],
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder that the servers can read.")
    ],
    server_folder: Annotated[
        str | None, typer.Option(metavar="PATH", help="The servers' path to DIR, if it differs.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="The served checkpoint: its config files, and the tensor names to expect.",
        ),
    ] = None,
    unchecked: Annotated[
        bool,
        typer.Option("--unchecked", metavar="", help="Load versions that cannot be checked."),
    ] = False,
    lora: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The versions are a LoRA adapter called NAME."),
    ] = None,
    pause: Annotated[
        str | None, typer.Option(metavar="MODE", help="How running requests are paused.")
    ] = None,
    load_timeout: Annotated[
        float,
        typer.Option(
            min=SECONDS_MIN,
            callback=_seconds,
            metavar="S",
            help="Seconds for servers to answer at the start, and to load a version.",
        ),
    ] = 300.0,
    once: Once = False,
    as_json: Json = False,
    timeout: Silence = None,
    name: Name = None,
    keys: Keys = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="WEIGHTBUS_SERVER_TOKEN",
            metavar="TOKEN",
            help="The servers' API key; better in the environment.",
        ),
    ] = None,
) -> None:
    """Make inference servers load a model's versions as they are published."""
    wanted = SubscribeOptions.of(address, model, once, timeout, name, keys)
    how = (server_folder, like, lora, pause, load_timeout, token, unchecked)
    served = BridgeOptions(server, kind, folder, *how)
    _end_with(as_json, run_bridge, wanted, served)


@app.command(cls=_Command)
def top(
    address: Address,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Show the workers once, then exit.")
    ] = False,
    sort: Annotated[
        str,
        typer.Option(
            metavar="BY", help=f"Sort by: {', '.join(SORTS)}.", autocompletion=lambda: list(SORTS)
        ),
    ] = "trouble",
    only: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Show only rows that contain TEXT.")
    ] = "",
    timeout: AnswerSeconds = 5.0,
    keys: Keys = None,
    as_json: Json = False,
) -> None:
    """Watch who runs which version, the worst first."""
    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r} is none of {', '.join(SORTS)}")
    choice = Choice(sort, only)
    _end_with(as_json, run_top, address, choice, once=once, timeout=timeout, keys=keys)


@app.command(cls=_Command)
def status(
    address: Address,
    expect: Annotated[
        int, typer.Option(min=0, metavar="N", help="The number of workers to require.")
    ] = 0,
    within: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="How long a worker may be behind."),
    ] = BEHIND_SECONDS,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready",
            metavar="",
            help="Report only whether it can serve workers.",
        ),
    ] = False,
    timeout: AnswerSeconds = 5.0,
    keys: Keys = None,
    as_json: Json = False,
) -> None:
    """Report whether all workers run the newest versions: 0 yes, 1 no, 2 no answer."""
    if ready and expect:
        raise typer.BadParameter("--ready asks nothing about workers: leave out --expect")
    if ready:
        _end_with(as_json, run_ready, address, timeout, keys)
    _end_with(as_json, run_status, address, expect, timeout, keys, within)


@app.command(cls=_Command)
def verify(
    address: Address,
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this worker. [default: all]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this model. [default: all]")
    ] = None,
    timeout: AnswerSeconds = 60.0,
    keys: Keys = None,
    as_json: Json = False,
) -> None:
    """Compare workers' weights with the published weights.

    Exit code 0: equal, 1: some differ, 2: no answer, 3: some unknown.
    """
    _end_with(as_json, run_verify, address, worker, model, timeout, keys)


@app.command(cls=_Command)
def doctor(
    address: Annotated[
        str | None, typer.Argument(metavar="[ADDR]", help="The address of a publisher or relay.")
    ] = None,
    timeout: AnswerSeconds = 5.0,
    keys: Keys = None,
    as_json: Json = False,
) -> None:
    """Find problems here and at a publisher or relay: 0 none, 1 some, 2 no answer."""
    _end_with(as_json, run_doctor, address, timeout, keys)


@app.command(cls=_Command)
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The publisher's key folder.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Workers; a * stands for any characters: gpu-*"),
    ] = None,
    observer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An observer: it may read the state, but no weights."),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A relay; its keys are in DIR/relays/NAME."),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RELAY",
            help="Where workers connect: a file for each RELAY; 'publisher': no relay.",
        ),
    ] = None,
    above: Annotated[
        list[str] | None,
        typer.Option(metavar="RELAY", help="Where relays connect; the preferred one first."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make keys: a publisher's, and one for each worker or relay that may have its weights."""
    _end_with(as_json, run_keygen, folder, names, observer, relay, at, above)


@app.command(cls=_Command)
def inspect(
    path: Checkpoint,
    every: Annotated[bool, typer.Option("--all", metavar="", help="Show every tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's tensors, and the digest that its publish has."""
    _end_with(as_json, run_inspect, path, every)
