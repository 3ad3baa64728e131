"""The mutations of ``make mutations`` fit the files; that tests notice them is for the script."""

from pathlib import Path

import mutations
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.what)
def test_a_mutation_fits_its_file(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert (ROOT / mutation.test).is_file()
