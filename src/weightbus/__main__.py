"""`python -m weightbus`: the command line."""

from .python_client.cli.main import main

if __name__ == "__main__":
    main()
