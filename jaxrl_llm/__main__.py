"""The program: ``jaxrl-llm``, or ``python -m jaxrl_llm`` where the scripts of the environment are not on the path."""

import sys

WINDOWS = "jaxrl-llm: Windows is not supported: use WSL2 (wsl --install), and install jaxrl_llm there"


def main() -> None:
    """Run the command line; on Windows, which lacks what most modules import, exit with code 2 and one line."""
    if sys.platform == "win32":
        print(WINDOWS, file=sys.stderr)
        sys.exit(2)
    from jaxrl_llm import cli

    cli.main()


if __name__ == "__main__":
    main()
