"""The command `mprollout`. Each subcommand is a dataclass whose docstrings are its `--help`, with an example and its exit codes.

Exit codes of all: 0 done; 1 not as it should be (each `--help` says what that is); 2 a wrong setting or an engine error, said in one line; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Union, get_args

import tyro

from mprollout.audit import AuditArgs
from mprollout.calibration import CalibrateArgs, run_calibrate
from mprollout.demo.args import DemoArgs
from mprollout.demo.controls import ControlArgs, LagArgs, SeedArgs
from mprollout.doctor import DoctorArgs, run_doctor
from mprollout.errors import MprolloutError
from mprollout.generate import GenerateArgs, run_generate
from mprollout.monitor import TopArgs
from mprollout.report import ReportArgs, run_report
from mprollout.sweep import SimulateArgs, run_simulate
from mprollout.verify import VerifyArgs, run_verify
from mprollout.view import ViewArgs, run_view

Command = (
    Annotated[DemoArgs, tyro.conf.subcommand("demo")]
    | Annotated[ControlArgs, tyro.conf.subcommand("demo-controls")]
    | Annotated[SeedArgs, tyro.conf.subcommand("demo-seeds")]
    | Annotated[LagArgs, tyro.conf.subcommand("demo-lags")]
    | Annotated[TopArgs, tyro.conf.subcommand("top")]
    | Annotated[ReportArgs, tyro.conf.subcommand("report")]
    | Annotated[SimulateArgs, tyro.conf.subcommand("simulate")]
    | Annotated[CalibrateArgs, tyro.conf.subcommand("calibrate")]
    | Annotated[VerifyArgs, tyro.conf.subcommand("verify")]
    | Annotated[AuditArgs, tyro.conf.subcommand("audit")]
    | Annotated[GenerateArgs, tyro.conf.subcommand("generate")]
    | Annotated[ViewArgs, tyro.conf.subcommand("view")]
    | Annotated[DoctorArgs, tyro.conf.subcommand("doctor")]
)


_ABOUT = """Rollouts for RL post-training on one node. `mprollout COMMAND --help` has the options of a command, an example and its exit codes: 0 done; 1 not as it should be; 2 a wrong setting or an
engine error; 130 Ctrl-C. `--tyro-print-completion bash` (or zsh) prints what completes commands and options in a shell.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    try:
        named = given and not given[0].startswith("-")
        return run(tyro.cli(Command if named else _listed(), args=given, prog="mprollout", description=_ABOUT))
    except (MprolloutError, OSError) as error:
        print(f"mprollout: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _listed() -> Any:
    """As `Command`, each with the first paragraph of its docstring alone: for the list of all."""
    kinds = {configuration.name: kind for kind, configuration in map(get_args, get_args(Command))}
    return Union[  # noqa: UP007 (of a tuple)
        tuple(
            Annotated[kind, tyro.conf.subcommand(name, description=" ".join(kind.__doc__.split("\n\n")[0].split()))]
            for name, kind in kinds.items()
        )
    ]


def run(args: Command) -> int:
    """Do what the arguments say."""
    from mprollout import audit, monitor
    from mprollout.demo import controls
    from mprollout.demo.run import run_demo

    match args:
        case DemoArgs():
            return 130 if run_demo(args).interrupted else 0
        case ControlArgs():
            return 0 if controls.run_controls(args) else 1
        case SeedArgs():
            return 0 if controls.run_seeds(args) else 1
        case LagArgs():
            return 0 if controls.run_lags(args) else 1
        case TopArgs():
            monitor.run_top(args)
            return 0
        case ReportArgs():
            run_report(args)
            return 0
        case SimulateArgs():
            run_simulate(args)
            return 0
        case CalibrateArgs():
            run_calibrate(args)
            return 0
        case VerifyArgs():
            return run_verify(args)
        case AuditArgs():
            return audit.run_audit(args)
        case GenerateArgs():
            return run_generate(args)
        case ViewArgs():
            return run_view(args)
        case DoctorArgs():
            return run_doctor(args)


if __name__ == "__main__":
    sys.exit(main())
