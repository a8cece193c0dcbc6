"""What does `python -m vestige` do? What the command `vestige` does, which begins here."""

from __future__ import annotations

import sys


def main() -> None:
    """The `vestige` command; Ctrl-C while it is imported ends it in a line, too."""
    try:
        from vestige.cli.main import main as command

        command()
    except KeyboardInterrupt:
        print("vestige: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
