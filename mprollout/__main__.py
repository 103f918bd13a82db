"""The way into the command, which has to work before anything else does: `mprollout doctor` where the others cannot be imported."""

from __future__ import annotations

import sys

from mprollout.doctor import DoctorArgs, run_doctor


def main() -> int:
    """Run one command; returns its exit code."""
    try:
        from mprollout import cli
    except ImportError as error:  # the native part is not built, or a package is missing
        if sys.argv[1:2] == ["doctor"]:
            return run_doctor(DoctorArgs(json="--json" in sys.argv, quick="--quick" in sys.argv))
        print(f"mprollout: {error}; `mprollout doctor` says what is missing and what to do", file=sys.stderr)
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
