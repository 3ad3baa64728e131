"""One word for each thing: words that the field's terms have replaced stay out of the tree."""

import re
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".md", ".txt"}
_SUFFIXES |= {".sh", ".cmake", ".in", ".toml", ".yml"}

# The term to use; an expression for the words that it replaces, without regard to case; an example.
_REPLACED = {
    "forward, data gradient, weight gradient": (
        r"\bgathers?\b|\bscatters?\b|\b(?:narrow|wide) (?:tensor|operand)",
        "a gather of the wide tensor",
    ),
    "epilogue": (
        r"\bends? of (?:a|the|its|each) (?:product|convolution|GEMM)|\bthe other end\b",
        "the end of a convolution",
    ),
    "GEMM, or convolution": (r"\bproducts?\b", "the product of a layer"),
    "safe to prefetch": (r"\bsettled?\b", "settled weights"),
    "grid dependency, dependent launch": (r"\b(?:predecessor|successor)s?\b", "its predecessor"),
    "producer, consumer": (r"\b(?:copying|multiplying) (?:warp|thread)", "the copying warp"),
    "circular buffer, pipeline stages": (r"\brings?\b|\brounds? of K\b", "a ring of stages"),
    "TMA, bulk copy, DMA copy engine": (r"(?<!DMA )\bcopy engine", "by the copy engine"),
    "acknowledgement": (r"\bowing\b", "the owing blocks"),
    "partial-sum messages with an in-band flag": (r"\bletters?\b|\bwords that say", "a letter"),
    "poll, check, change detection": (
        r"\bin vain\b|\b(?:a|the|first|next|no|each|every|last) looks?\b|\blooking\b"
        r"|\blooks\b(?! (?:up|like)\b)",
        "a look in vain",
    ),
    "injected test delay": (r"\bmay[ _]be[ _]late\b", "may_be_late(warp)"),
    "issue the load, request": (r"\bask(?:s|ed|ing)? (?:for|again)\b", "asks for the weights"),
    "step conditioning, receive": (r"\btold\b", "what the network is told"),
    "L1, L2; instruction-cache misses": (
        r"\b(?:first|second)[ -](?:level )?cache\b|\bfar[- ]away instructions\b",
        "the second cache",
    ),
    "split-K, work stealing, sharding": (
        r"\bshare_long\b|\bshar(?:e|es|ed|ing) out\b",
        "shared out",
    ),
    "track versions, changed, verify": (
        r"\b(?:can_tell|why_original|altered_in_trace)\b|\bdiffered\(|\bleaves? no trace",
        "leaves no trace",
    ),
    "replacement, fake": (r"\bstand[-_ ]?ins?\b", "a stand-in"),
    "condition_data, condition_mask": (r"\bimpos(?:e|es|ed|ing)\b|\binpaint\b", "imposed values"),
    "random numbers, noise": (r"\bdraws\b", "draws of a call"),
    "conditioning dimension": (r"\bnumbers? of condition", "132 numbers of condition"),
    "corrupt, mutate": (r"\bspoil(?:s|t|ed|ing)?\b", "a spoilt argument"),
}
_PATTERNS = {term: re.compile(words, re.I) for term, (words, _) in _REPLACED.items()}

# Names and set phrases that stay: torch's, registered ops', mathematics'.
_NAMES = re.compile(
    r"\b(?:normal_draws|all[_-]gather|reduce[_-]scatter|itertools\.product|(?:cross|dot) products?)"
    r"|\.(?:gather|scatter)\("
    r"|\bproduct\("  # itertools'
)

# The argument of `dpa::normal_draws`, and what only wraps or tests that op.
_ARGUMENT = re.compile(r"\bdraws\b", re.I)
_OF_THE_ARGUMENT = ("ops/normal_draws/", "ops/library.cpp", "test/ops/test_normal_draws.py")


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if Path(name).suffix in _SUFFIXES]
    return [name for name in names if name != "test/docs/test_words.py"]


def _text(name: str) -> str:
    text = (_ROOT / name).read_text()
    return _ARGUMENT.sub("", text) if name.startswith(_OF_THE_ARGUMENT) else text


def _found(text: str) -> list[str]:
    """Each replaced word of a text, with its line and the term to use."""
    text = _NAMES.sub("", text)
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}: say {term}"
        for term, pattern in _PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def test_the_field_s_terms_are_used():
    found = {name: _found(_text(name)) for name in _files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("term", _REPLACED)
def test_each_replaced_word_is_found(term):
    example = _REPLACED[term][1]
    assert any(line.endswith(f"say {term}") for line in _found(f"first line\n{example}")), example


def test_names_that_stay_are_passed_over():
    text = "torch.ops.dpa.normal_draws(x); dist.all_gather(parts); x.gather(0, i); a dot product"
    assert _found(text) == []
