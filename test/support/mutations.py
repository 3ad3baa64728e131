"""Breaks kernels on purpose, one line at a time, to see whether a test notices.

mutations.py [WORD]: those whose description or file holds WORD.

Each mutation is one replacement in one file: a bound, a stride, a barrier, a sign. The test named
beside it, which passes on the files as they are, must fail on the broken ones, or not end. Those of
CUDA kernels run where there is a GPU, those of the convolution where it is a Hopper.
Exit status 1 if any mutation lives.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def _sources(*patterns: str) -> list[str]:
    files = (file for pattern in patterns for file in sorted(_ROOT.glob(pattern)))
    return [str(file.relative_to(_ROOT)) for file in files]


_LAUNCH, _MATH = "test/cpp/launch_plan_test.cpp", "test/cpp/math_test.cpp"
_CONV, _UNET = "test/cpp/conv1d_plan_test.cpp", "test/cpp/unet1d_plan_test.cpp"
_CLUSTERS = "test/cpp/unet1d_cluster_test.cpp"
_PHASES, _TEAMS = "test/cpp/unet1d_phases_test.cpp", "test/cpp/unet1d_teams_test.cpp"
_GPU, _CONVOLUTIONS = "test/kernels/common_test.cu", "test/kernels/conv1d_test.cu"
_UNET1D_PLANS = _sources("kernels/plans/unet1d/*.cpp")
# A test's sources beside itself.
_TESTS = {
    _LAUNCH: [],
    _MATH: [],
    _CONV: ["kernels/plans/conv1d/plan.cpp"],
    _UNET: _UNET1D_PLANS,
    _CLUSTERS: _UNET1D_PLANS,
    _PHASES: _UNET1D_PLANS,
    _TEAMS: _UNET1D_PLANS,
    _GPU: [],
    _CONVOLUTIONS: _sources(
        "kernels/*/conv1d/*.cu", "kernels/*/conv1d/*.cpp", "test/kernels/conv1d_[!t]*.cu"
    ),
}


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new``, once, in ``file``; ``test`` has to notice."""

    what: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "bound: no block for the last items",
        "kernels/plans/grid.h",
        "items / per_block + (items % per_block != 0)",
        "items / per_block",
        _LAUNCH,
    ),
    Mutation(
        "bound: a grid one larger than the largest",
        "kernels/plans/grid.h",
        "(int64_t{1} << 31) - 1;",
        "int64_t{1} << 31;",
        _LAUNCH,
    ),
    Mutation(
        "bound: 32-bit numbers for 2^31 items",
        "kernels/plans/grid.h",
        "items < (int64_t{1} << 31)",
        "items <= (int64_t{1} << 31)",
        _LAUNCH,
    ),
    Mutation(
        "bound: rows longer than the shared memory",
        "kernels/plans/lltm/plan.h",
        "inputs <= kLltmMaxInputs",
        "inputs <= kLltmMaxInputs + 1",
        _LAUNCH,
    ),
    Mutation(
        "formula: mish's quotient",
        "kernels/math/mish.h",
        "x * (n / (n + A(2)))",
        "x * (n / (n + A(1)))",
        _MATH,
    ),
    Mutation(
        "bound: exp below the normal range",
        "kernels/math/mish.h",
        "return vanishes ? 0.0f : (e.tail + 1.0f) * e.scale;",
        "return (e.tail + 1.0f) * e.scale;",
        _MATH,
    ),
    Mutation(
        "formula: a clamp that swallows NaN",
        "kernels/math/diffusion_step.h",
        "x < -limit ? -limit : (x > limit ? limit : x)",
        "x >= -limit ? (x > limit ? limit : x) : -limit",
        _MATH,
    ),
    Mutation(
        "stride: the columns of a table",
        "kernels/math/diffusion_step.h",
        "const A* c = table + row * kColumns;",
        "const A* c = table + row * (kColumns - 1);",
        _MATH,
    ),
    Mutation(
        "formula: noise in the last step",
        "kernels/math/diffusion_step.h",
        "noisy = has_noise && row != 0;",
        "noisy = has_noise;",
        _MATH,
    ),
    Mutation(
        "sign: the slope of the candidate",
        "kernels/math/lltm.h",
        "slope = linear ? A(1)",
        "slope = !linear ? A(1)",
        _MATH,
    ),
    Mutation(
        "shift: a tap beside its place",
        "kernels/plans/conv1d/plan.cpp",
        "plan.shift[0][k] = k - conv.padding;",
        "plan.shift[0][k] = k - conv.padding + 1;",
        _CONV,
    ),
    Mutation(
        "stride: every phase of a transposed convolution",
        "kernels/plans/conv1d/plan.cpp",
        "const int distance = p + conv.padding - k;",
        "const int distance = conv.padding - k;",
        _CONV,
    ),
    Mutation(
        "bound: the last rows of a batch",
        "kernels/plans/conv1d/plan.cpp",
        "tiles.count = ceil_div(batch, tiles.samples);",
        "tiles.count = batch / tiles.samples;",
        _CONV,
    ),
    Mutation(
        "bound: skipped terms that read more than padding",
        "kernels/plans/conv1d/plan.cpp",
        "return to + shift < 0 ||",
        "return from + shift < 0 ||",
        _CONV,
    ),
    Mutation(
        "offset: FiLM rows of two blocks overlap",
        "kernels/plans/unet1d/plan.cpp",
        "p.film_rows += rows;",
        "p.film_rows += rows / 2;",
        _UNET,
    ),
    Mutation(
        "offset: a vector over the next one",
        "kernels/plans/unet1d/plan.cpp",
        "float_count += (2 * channels + 3) / 4 * 4;",
        "float_count += channels;",
        _UNET,
    ),
    Mutation(
        "bound: more columns than the grid covers",
        "kernels/plans/unet1d/call.cpp",
        "if (columns > kMaxColumns)",
        "if (columns > kMaxColumns + kLayeredColumns)",
        _UNET,
    ),
    Mutation(
        "barrier: sums sent before the receiver has read its last ones",
        "kernels/plans/unet1d/cluster_layout.cpp",
        "next_peers = static_cast<int16_t>(ClusterTile(next, 0, 0).peers);",
        "next_peers = 0;",
        _CLUSTERS,
    ),
    Mutation(
        "barrier: two acknowledgements in a row for who shares no units",
        "kernels/plans/unet1d/cluster_layout.h",
        "return !(sharers >> peer & 1);",
        "return false;",
        _CLUSTERS,
    ),
    Mutation(
        "barrier: units that are kept, span tiles and exchange nothing",
        "kernels/plans/unet1d/cluster_layout.cpp",
        "conv.norm >= 0 || l.span_log2 > 0 ? std::max(0, -mine_log2) : 0;",
        "conv.norm >= 0 ? std::max(0, -mine_log2) : 0;",
        _CLUSTERS,
    ),
    Mutation(
        "barrier: a wait for a block that sends no acknowledgement",
        "kernels/plans/unet1d/cluster_layout.h",
        "by |= ((1u << l.finishers) - 1) << peer;",
        "by |= ((1u << p.peers) - 1) << peer;",
        _CLUSTERS,
    ),
    Mutation(
        "bound: samples of a phase without a tile",
        "kernels/plans/unet1d/phases.cpp",
        "f.tiles = f.slices_out * in * slices;",
        "f.tiles = f.slices_out * in;",
        _PHASES,
    ),
    Mutation(
        "stride: samples of a phase whose rows share a bank",
        "kernels/plans/unet1d/phases.h",
        "(times + pad) * row + (-pad * (row / 16) & 7) * 16;",
        "(times + pad) * row;",
        _PHASES,
    ),
    Mutation(
        "source: a finished input that keeps its residual",
        "kernels/plans/unet1d/phases.cpp",
        "behind.residual = {};",
        "behind.joined = f.joined;",
        _PHASES,
    ),
    Mutation(
        "bound: the last samples of a batch in parts",
        "kernels/plans/unet1d/call.cpp",
        "samples = ceil_div(batch, launches);",
        "samples = batch / launches;",
        _PHASES,
    ),
    Mutation(
        "bound: a block's channels that begin within a row tile",
        "kernels/plans/unet1d/teams.cpp",
        "ceil_div((r + 1) * own, 16) - r * own / 16);",
        "ceil_div(own, 16));",
        _TEAMS,
    ),
    Mutation(
        "count: a norm counts channels that only fill its groups up",
        "kernels/plans/unet1d/teams.cpp",
        "f.counted = counted / groups;",
        "f.counted = channels / groups;",
        _TEAMS,
    ),
    Mutation(
        "stride: a slab written while it is read",
        "kernels/plans/unet1d/teams.cpp",
        "return last = first == last ? at(1) : first;",
        "return last = first;",
        _TEAMS,
    ),
    Mutation(
        "barrier: scratch used again too early",
        "kernels/cuda/common/reduce.cuh",
        "x = warp_sum(lane < warps ? scratch[lane] : A(0));\n  __syncthreads();",
        "x = warp_sum(lane < warps ? scratch[lane] : A(0));",
        _GPU,
    ),
    Mutation(
        "barrier: sums read before they are written",
        "kernels/cuda/common/reduce.cuh",
        "if (lane == 0) scratch[warp] = x;\n  __syncthreads();",
        "if (lane == 0) scratch[warp] = x;",
        _GPU,
    ),
    Mutation(
        "bound: half of a warp",
        "kernels/cuda/common/reduce.cuh",
        "int offset = width / 2;",
        "int offset = width / 4;",
        _GPU,
    ),
    Mutation(
        "rounding: towards zero",
        "kernels/cuda/common/dtype.cuh",
        "__float2bfloat16_rn(x)",
        "__float2bfloat16_rz(x)",
        _GPU,
    ),
    Mutation(
        "flag: no grid dependency synchronisation",
        "kernels/cuda/common/launch.cuh",
        "cudaGridDependencySynchronize();",
        "",
        _GPU,
    ),
    Mutation(
        "bound: samples behind the last one",
        "kernels/cuda/conv1d/epilogue.cuh",
        "sample < args.batch && time < args.out_length;",
        "time < args.out_length;",
        _CONVOLUTIONS,
    ),
    Mutation(
        "bound: rows of a stage that no load writes",
        "kernels/cuda/conv1d/wgrad.cu",
        "if (used == kChunk) return;",
        "if (used >= 0) return;",
        _CONVOLUTIONS,
    ),
    Mutation(
        "stride: a box of every row",
        "kernels/cuda/conv1d/tensor_map.cpp",
        "steps[of_rows] = step;",
        "steps[of_rows] = 1;",
        _CONVOLUTIONS,
    ),
    Mutation(
        "stride: eight rows of weights",
        "kernels/cuda/conv1d/convolution_kernel.cuh",
        "kRowBytes : 16, 1024, wgmma::Swizzle::k128);",
        "kRowBytes : 16, 512, wgmma::Swizzle::k128);",
        _CONVOLUTIONS,
    ),
    Mutation(
        "barrier: weights read before they arrive",
        "kernels/cuda/conv1d/convolution_kernel.cuh",
        "(full_barrier(pipelines.weights, weight_at), weight_at.phase);\n      if (term",
        "(full_barrier(pipelines.weights, weight_at), weight_at.phase ^ 1);\n      if (term",
        _CONVOLUTIONS,
    ),
    Mutation(
        "barrier: a stage written before it was read",
        "kernels/cuda/conv1d/pipeline.cuh",
        "  ptx::barrier_wait(ptx::shared_address(&pipeline.empty[at.stage]), at.phase ^ 1);\n",
        "",
        _CONVOLUTIONS,
    ),
    Mutation(
        "barrier: sums take the place of what another warpgroup reads",
        "kernels/cuda/conv1d/convolution.cuh",
        "trigger_dependent_launch();\n  ptx::sync_threads(1, kConsumerThreads);",
        "trigger_dependent_launch();\n",
        _CONVOLUTIONS,
    ),
    Mutation(
        "barrier: a cluster's blocks do not wait for one another",
        "kernels/cuda/common/ptx_cluster.cuh",
        '"barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;"',
        '""',
        _CONVOLUTIONS,
    ),
    Mutation(
        "flag: the convolution reads before the grid dependency resolves",
        "kernels/cuda/conv1d/convolution_kernel.cuh",
        "grid_dependency_sync();\n    PipelineState box_at;",
        "PipelineState box_at;",
        _CONVOLUTIONS,
    ),
    Mutation(
        "flag: wgrad reads before the grid dependency resolves",
        "kernels/cuda/conv1d/wgrad.cu",
        "  grid_dependency_sync();\n",
        "",
        _CONVOLUTIONS,
    ),
]


def _capability() -> str:
    """Compute capability of the first GPU, such as ``9.0``; empty without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]


def _build(tree: Path, test: str, program: Path) -> bool:
    """Compile a test, its sources side by side. Whether it could be."""
    compiler = ["nvcc", "-O2", "-arch=native"] if test.endswith(".cu") else ["c++", "-O1"]
    libraries = ["-lgtest_main", "-lgtest"]
    if test == _CONVOLUTIONS:
        compiler = ["nvcc", "-O2", "-gencode=arch=compute_90a,code=sm_90a", "-DDPA_SM90A"]
        libraries = []
    sources = [tree / file for file in (test, *_TESTS[test])]
    objects = [program.with_name(f"{source.name}.o") for source in sources]

    def run(*arguments: object) -> int:
        command = [*compiler, "-std=c++20", f"-I{tree}", *map(str, arguments)]
        return subprocess.run(command, capture_output=True).returncode

    with ThreadPoolExecutor() as pool:
        failed = list(pool.map(lambda s, o: run("-c", s, "-o", o), sources, objects))
    return not any(failed) and not run(*objects, "-o", program, *libraries)


def _verdict(tree: Path, test: str, program: Path) -> str:
    """What a test makes of the files: ``passes``, ``fails`` or ``does not compile``."""
    if not _build(tree, test, program):
        return "does not compile"
    arguments = ["test"] if test == _CONVOLUTIONS else []
    try:
        failed = subprocess.run([program, *arguments], capture_output=True, timeout=60).returncode
    except subprocess.TimeoutExpired:
        failed = 1
    return "fails" if failed else "passes"


def main(word: str = "") -> int:
    """Try every mutation whose description or file holds ``word``."""
    capability, lives = _capability(), 0
    sound: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree, program = Path(folder) / "tree", Path(folder) / "test"
        for part in ("kernels", "test"):
            shutil.copytree(_ROOT / part, tree / part, ignore=shutil.ignore_patterns("*.pyc"))
        for m in MUTATIONS:
            if word not in f"{m.what} {m.file}":
                continue
            needed = {_GPU: "", _CONVOLUTIONS: "9."}.get(m.test)
            if needed is not None and not (capability and capability.startswith(needed)):
                print(f"no GPU    {m.what}")
                continue
            if m.test not in sound:
                sound[m.test] = _verdict(tree, m.test, program)
                if sound[m.test] != "passes":
                    print(f"{m.test} {sound[m.test]} on the files as they are")
                    return 1
            path = tree / m.file
            whole = path.read_text()
            if whole.count(m.old) != 1:
                print(f"{m.file} must hold once: {m.old}")
                return 1
            path.write_text(whole.replace(m.old, m.new))
            verdict = _verdict(tree, m.test, program)
            path.write_text(whole)
            lives += verdict != "fails"
            result = {"fails": "noticed", "passes": "LIVES"}.get(verdict, "NO MUTATION")
            print(f"{result:9} {m.what} ({m.file})", flush=True)
    print(f"{lives} live")
    return int(lives > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
