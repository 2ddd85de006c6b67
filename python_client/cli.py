"""The command line's entry: the console script `weightbus` and `python -m weightbus`."""

import sys

EXTRA = {"typer", "click", "rich"}  # what the extra `cli` brings


def main() -> None:
    """Run the command line; ends the process with one of the exit codes in `cli_outcome`."""
    try:
        from .cli_commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        sys.exit(
            f"error: the command line needs {error.name}, which is not installed: "
            "pip install 'weightbus[cli]'"
        )
    except KeyboardInterrupt:  # during the imports; from then on `cli_outcome` deals with signals
        sys.exit(130)
    app(prog_name="weightbus")
