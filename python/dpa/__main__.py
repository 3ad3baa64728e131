"""``python -m dpa`` is the ``dpa`` command."""

from dpa.cli.app import main

main()
