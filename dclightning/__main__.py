"""The ``dclightning`` command: finds the module that a subcommand lives in. Help costs no heavy import."""

import atexit
import gc
import os
import signal
import sys
from importlib import import_module

COMMANDS = {
    "fit": ("dclightning.cli", "train a policy"),
    "validate": ("dclightning.cli", "evaluate the deployed policy on the validation problems"),
    "test": ("dclightning.cli", "the same, under the test names"),
    "doctor": ("dclightning.doctor", "say what is wrong with an installation or a run, and what to do"),
    "plan": ("dclightning.plan", "estimate memory and time from a run's config, before there is a GPU"),
    "calibrate": ("dclightning.cli", "measure the discrepancy before a run, and propose a budget"),
    "inspect": ("dclightning.inspection", "write a page of responses coloured by their discrepancy"),
    "evaluate": ("dclightning.evaluate", "measure policies on benchmarks, as they are deployed"),
    "serve": ("dclightning.serve", "sample for runs on other machines: vLLM behind a token"),
    "export": ("dclightning.export", "write a checkpoint as a folder that transformers and vLLM load"),
    "prepare": ("dclightning.prepare", "drop the problems that had better not be trained on"),
    "score": ("dclightning.score", "judge the answers of responses in a file"),
    "toy": ("dclightning.toy", "show what the three discrepancies do to a policy of a few actions"),
    "report": ("dclightning.report", "print what a run has achieved"),
}

USAGE = """usage: dclightning COMMAND [OPTIONS]

GRPO under a train-inference discrepancy constraint, on PyTorch Lightning and vLLM.

{commands}

dclightning COMMAND --help shows a command's options, dclightning --version the version."""


def main() -> None:
    """Run the command line; exits with 2 if the user can mend what is wrong."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items())))
        return
    if arguments[0] == "--version":
        from dclightning import __version__

        print(__version__)
        return
    if arguments[0] not in COMMANDS:
        sys.exit(_complain(f"{arguments[0]!r} is not a command; there are {', '.join(COMMANDS)}"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # takes effect before torch is imported only
    sys.path.insert(0, os.getcwd())  # users name their own rewards and callbacks by import path
    from dclightning.errors import UserError

    try:
        # Imports leave no garbage, and looking for it among all that they bring takes seconds. At the end the collector
        # gets to see it, or else bindings tell of leaks.
        gc.disable()
        command = import_module(COMMANDS[arguments[0]][0])
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)
        command.main(arguments)
    except UserError as error:
        sys.exit(_complain(f"{arguments[0]}: {error}"))
    except KeyboardInterrupt:
        print("dclightning: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _complain(message: str) -> int:
    print(f"dclightning: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
