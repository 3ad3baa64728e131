"""``python -m dpa`` is the ``dpa`` command."""

from dpa.cli import main

main()
