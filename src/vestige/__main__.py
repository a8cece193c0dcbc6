"""What does `python -m vestige` do? What the command `vestige` does."""

from vestige.cli.main import main

if __name__ == "__main__":
    main()
