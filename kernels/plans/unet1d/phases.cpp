// Walks the plan's GEMMs, wires inputs to outputs, and gives each phase the tiling that a model of its time prefers.
#include "kernels/plans/unet1d/phases.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>

namespace dpa::kernels::unet1d {
namespace {

// What a tiling must hold in shared memory, beside the buffer of weights and the table of phases.
struct Needs {
  int columns, parameters, sample, slab, stash, residual, statistics;
};

class PhaseBuilder {
 public:
  PhaseBuilder(const Plan& p, int n, int t, const Device& d, int buffer_slots)
      : plan(p), batch(n), horizon(t), device(d), slots(buffer_slots) {}

  /// `reserve`: bytes of shared memory that tiles leave free, so that the phases' tables may stay there.
  PhasePlan build(Finish finish, int reserve) {
    reserved = reserve;
    wide = plan.dtype == DType::kFloat32;
    const Config& c = plan.config;
    if (horizon % (1 << (c.levels - 1))) return fail("the horizon must be a multiple of 2^(levels - 1)");
    out.sample_words = take(int64_t{batch} * horizon * c.action_dim);
    flow.value.kind = flow.next_residual.kind = SourceKind::kHead;
    flow.norm = static_cast<int>(plan.head.norm), flow.film = static_cast<int>(plan.head.film);
    flow.groups = c.num_groups, flow.counted = c.width(0).own;
    for (const Conv& conv : plan.convs)
      if (!add(conv, finish)) return fail("a tile does not fit into shared memory");
    tail(flow.value, flow.norm);
    if (words.at > kMostWords) return fail("the messages must be fewer than 2^31 words");
    lay_out();
    return out;
  }

 private:
  // What a convolution finds of those before it.
  struct Flow {
    PhaseSource value, residual, next_residual;  // its input; what is added to it; what the block's last one is to add
    int norm = -1, groups = 0, film = -1, counted = 0;
    bool keep = false;  // the finished input is the block's residual
    int skip = -1;      // and a skip connection's
    PhaseSource skips[kMaxLevels];
  } flow;

  // A convolution's phases: it finishes its own input, or reads what a phase of its own finishes, whichever takes less.
  bool add(const Conv& conv, Finish finish) {
    Phase f;
    f.value = flow.value, f.residual = flow.residual;
    input(f, conv.channels_in, conv.slices_in, horizon >> conv.level_in, flow.norm, flow.groups, flow.counted,
          flow.film);
    Phase finishing = f;  // a phase for the input of f alone
    finishing.kind = PhaseKind::kFinish;
    if (conv.skip_in >= 0) f.joined = 1, f.skip = flow.skips[conv.skip_in];
    gemm(f, conv);
    Phase behind = f;  // f behind it
    behind.value.kind = SourceKind::kFinished, behind.residual = {};
    input(behind, conv.channels_in, conv.slices_in, f.times_in, -1, flow.groups, flow.counted, -1);
    const bool direct = finish != Finish::kAlways && choose(f),
               finishes = finish != Finish::kNever && choose_finishing(finishing) && choose(behind) &&
                          (!direct || clocks(finishing) + clocks(behind) < clocks(f));
    if (!direct && !finishes) return false;
    if (finishes || flow.keep || flow.skip >= 0) behind.value = keep_input(finishes ? finishing : f, conv);
    if (finishes) push(finishing), out.finishes++;
    Phase& made = finishes ? behind : f;
    place(made, conv);
    push(made);
    follow(made, conv);
    return true;
  }
  // The phase keeps its finished input.
  PhaseSource keep_input(Phase& f, const Conv& conv) {
    f.keep_stride = round_up(conv.channels_in, 16);
    f.keep = take(int64_t{batch} * f.times_in * f.keep_stride);
    const PhaseSource kept = {SourceKind::kFinished, f.keep, 1, 0, f.keep_stride};
    if (flow.keep) flow.next_residual = kept;
    if (flow.skip >= 0) flow.skips[flow.skip] = kept;
    return kept;
  }
  void follow(const Phase& f, const Conv& conv) {
    flow.value = {SourceKind::kPartials, f.segments[0].out, f.slices_in, f.partial_stride, f.column_stride};
    if (f.num_segments == 2 && !conv.upsample)
      flow.next_residual = flow.value, flow.next_residual.words = f.segments[1].out;
    flow.norm = static_cast<int>(conv.norm), flow.groups = conv.groups, flow.film = static_cast<int>(conv.film);
    flow.counted = conv.counted, flow.keep = conv.keep, flow.skip = conv.skip;
    flow.residual = conv.add ? flow.next_residual : PhaseSource{};
  }
  void push(const Phase& f) {
    out.phases.push_back(f);
    out.clocks += clocks(f);
  }

  const Plan& plan;
  const int batch, horizon;
  const Device device;
  const int slots;   // of the buffer of weights
  int reserved = 0;  // bytes
  PhasePlan out;
  bool wide = false;
  static constexpr int64_t kMostWords = std::numeric_limits<int>::max();
  Places<int64_t> words = {32, 32};  // the first ones: kStuck

  // Places of a plan are ints: one whose words are too many for them is refused in the end.
  int take(int64_t count) { return static_cast<int>(words(count)); }
  PhasePlan fail(const char* why) {
    out.error = why;
    return out;
  }
  void input(Phase& f, int channels, int units, int times, int norm, int groups, int counted, int film) {
    f.channels_in = channels, f.times_in = times;
    f.norm = norm, f.film = film;
    f.units = units, f.unit_channels = channels / units, f.unit_padded = round_up(f.unit_channels, 16);
    f.group_channels = norm >= 0 ? channels / groups : channels;
    f.counted = norm >= 0 ? counted / groups : channels;
    f.group_magic = magic_of(f.group_channels), f.counted_magic = magic_of(f.counted);
  }

  void gemm(Phase& f, const Conv& conv) {
    f.channels_out = conv.channels_out, f.row_tiles = ceil_div(conv.channels_out, 16);
    f.slice_tiles = tiling(plan, conv).row_tiles;
    f.times_out = horizon >> conv.level_out;
    f.columns = conv.upsample ? f.times_in : f.times_out;
    f.time_stride = conv.stride, f.num_segments = conv.num_segments;
    f.column_stride = f.row_tiles * (wide ? 16 : 8);
    f.partial_stride = static_cast<int>(slice_words(f));
    for (int s = 0; s < conv.num_segments; s++) {
      PhaseSegment& g = f.segments[s];
      g.taps = conv.segments[s].taps, g.first = conv.segments[s].first;
      f.pad = std::max({f.pad, -g.first, g.first + g.taps - 1});
      g.time_stride = conv.upsample ? 2 : 1, g.time_first = conv.upsample ? s : 0;
      g.bias = static_cast<int>(conv.bias[s]);
      g.scale = conv.scale < 0 ? -1 : static_cast<int>(conv.scale) + s * conv.channels_out;
      g.weights = conv.segments[s].weights;
    }
  }

  // Words of the partial sums of a slice of the input channels.
  int64_t slice_words(const Phase& f) const { return int64_t{batch} * f.times_out * f.column_stride; }

  Needs needs(const Phase& f) const {
    const int slice_units = ceil_div(f.units, f.slices_in) * (1 + f.joined);
    const int value_channels = round_up(ceil_div(f.units, f.slices_in) * f.unit_channels, 16),
              channels = value_channels * (1 + f.joined), rows = f.samples * f.times_in;
    Needs n = {};
    n.columns = f.samples * f.columns * 8;
    for (int s = 0; s < f.num_segments; s++) n.columns += slice_units * f.segments[s].taps * f.unit_padded / 16 * 4;
    const bool finished = f.kind == PhaseKind::kConv && f.value.kind == SourceKind::kFinished;
    n.parameters = (f.norm < 0 ? 0 : value_channels * 4 * (2 + 4 * f.samples)) +
                   2 * 2 * ceil_div(f.row_tiles, f.slices_out) * 16 * 4;
    const bool head = f.value.kind == SourceKind::kHead || f.residual.kind == SourceKind::kHead;
    if (head) {
      const int taps = f.value.kind == SourceKind::kHead ? plan.config.kernel_size : 1;
      n.sample = (taps * plan.config.action_dim + 1) * value_channels * 4 +
                 f.samples * (horizon + plan.config.kernel_size) * plan.config.action_dim * 4;
    }
    if (f.kind == PhaseKind::kTail) n.sample = plan.config.action_dim * (value_channels + 1) * 4;
    const int row = slab_row(slice_units * f.unit_padded, wide ? 4 : 2);
    n.slab = f.kind == PhaseKind::kConv ? f.pad * row + f.samples * slab_sample(f.times_in, f.pad, row) : 0;
    n.stash = finished ? 0 : rows * (channels + 4) * 4;
    if (f.warps_k > 1) n.stash = std::max(n.stash, kPhaseWarps * f.column_tiles * 512);
    n.residual = f.residual.kind == SourceKind::kNone ? 0 : rows * (value_channels + 4) * 4;
    n.statistics = f.norm < 0 ? 0 : 16 * std::max(kPhaseWarps, f.samples * ceil_div(value_channels, f.group_channels));
    return n;
  }
  static int total(const Needs& n) {
    return round_up(n.columns, 16) + round_up(n.parameters, 16) + round_up(n.sample, 16) + round_up(n.slab, 16) +
           round_up(n.stash, 16) + round_up(n.residual, 16) + round_up(n.statistics, 16);
  }
  int fixed() const {  // the buffer, entries of the table
    return kPhaseWarps * slots * phase_slot_bytes(plan.dtype) + 2 * kPhaseEntry + reserved;
  }

  // The warps of a block over its row tiles, columns and K.
  void warps(Phase& f) const {
    const int column_tiles = ceil_div(f.samples * f.columns, 8), rows = ceil_div(f.row_tiles, f.slices_out);
    f.warps_columns = 1;
    while (f.warps_columns * (wide ? kPhaseWideColumnTiles : kPhaseColumnTiles) < column_tiles) f.warps_columns *= 2;
    f.column_tiles = 1;
    while (f.column_tiles * f.warps_columns < column_tiles) f.column_tiles *= 2;
    f.warps_rows = std::min(kPhaseWarps / f.warps_columns, rows);
    f.warps_k = kPhaseWarps / f.warps_columns / f.warps_rows;
  }

  // Clocks of a tiling: a model, to compare tilings of one phase with. Rates of one multiprocessor: L2 40 bytes a
  // clock; its share of the stream of weights 18, or, with few slots, what is under way in the 1300 clocks that a pair
  // of tiles takes; an activation of a channel at a time 0.25 (30 instructions on 128 lanes); a partial sum stored 0.2.
  // A further tile of a block costs more than the first, whose preparation every phase has.
  double tiling_clocks(const Phase& f) const {
    constexpr double kFurther = 5000;
    const double under_way = slots * kPhaseWarps * phase_slot_bytes(plan.dtype) / 1300.0;
    const double stream = std::min(18.0, under_way);
    const int value_units = ceil_div(f.units, f.slices_in), channels = value_units * f.unit_padded;
    const double values = static_cast<double>(f.samples) * f.times_in * channels, word = wide ? 4 : 2;
    const int rows = ceil_div(f.row_tiles, f.slices_out), rounds = ceil_div(rows, f.warps_rows);
    double read = values * word * (f.value.kind == SourceKind::kPartials ? f.value.partials : 1);
    if (f.residual.kind == SourceKind::kPartials) read += values * word * f.residual.partials;
    if (f.residual.kind == SourceKind::kFinished || f.value.kind == SourceKind::kFinished) read += values * 4;
    if (f.joined) read += values * 4;
    double steps = 0, made = 0;
    for (int s = 0; s < f.num_segments; s++) {
      steps += f.segments[s].taps * value_units * (1 + f.joined) * f.unit_padded / 16.0;
      made += static_cast<double>(batch) * f.columns * f.channels_out;
    }
    const double weights = rows * steps * f.warps_columns * 256 * element_bytes(plan.dtype);
    const double one = f.column_tiles * (wide ? 40.0 : 10.0) + 40;
    const double gemm = rounds * (steps / f.warps_k + f.num_segments) * one;
    const double sums = f.warps_k > 1 ? 150.0 + f.column_tiles * 25 * f.num_segments : 60.0 * rounds;
    const double next = made * word * f.slices_in / std::min(device.multiprocessors, 8 * f.slices_batch) / 40,
                 published = made * f.slices_in / device.multiprocessors * 0.2;
    const int passes = ceil_div(f.tiles, device.multiprocessors);
    if (f.kind == PhaseKind::kFinish) {
      const bool one_group = f.samples == 1 && ceil_div(f.units, f.slices_in) * f.unit_channels == f.group_channels;
      const bool in_registers = one_group && values <= kGroupValues * kPhaseWarps * 32;
      return passes * (read / 40 + (in_registers ? values * 0.4 + 2600 : values * (f.norm >= 0 ? 1.35 : 0.7) + 4000));
    }
    return passes * (read / 40 + values * (f.norm >= 0 ? 0.35 : 0.1) + weights / stream * 0.7 + gemm + sums + 900) +
           (passes - 1) * kFurther + next + published;
  }

  // Clocks of a phase: where it finishes its own input, norms take longer than the model above says.
  double clocks(const Phase& f) const {
    if (f.kind == PhaseKind::kFinish || f.value.kind == SourceKind::kFinished) return tiling_clocks(f);
    const double values =
        static_cast<double>(f.samples) * f.times_in * ceil_div(f.units, f.slices_in) * f.unit_padded * (1 + f.joined);
    return tiling_clocks(f) + ceil_div(f.tiles, device.multiprocessors) * values * (f.norm >= 0 ? 1.0 : 0.6);
  }

  // Whether slices of the input begin at multiples of 16 channels, as messages do.
  static bool whole(const Phase& f, int slices) {
    return slices == 1 || f.unit_channels % 16 == 0 ||
           (f.units % slices == 0 && f.units / slices * f.unit_channels % 16 == 0);
  }

  bool choose(Phase& f) {
    constexpr int kMost = 0xffff, kMostColumns = 256;  // of a run's numbers; of a tile
    if (f.slice_tiles > kMost) return false;
    for (const PhaseSegment& g : f.segments)
      if (int64_t{f.units} * (1 + f.joined) * g.taps * (f.unit_padded / 16) > kMost) return false;
    double best = -1;
    Phase chosen = f;
    for (int in = 1; in <= 8 && in <= f.units; in *= 2) {
      for (int slices = 1; slices <= batch; slices++) {
        f.samples = ceil_div(batch, slices);
        if (!whole(f, in)) break;
        if (ceil_div(batch, f.samples) != slices) continue;
        if (f.samples * f.columns > kMostColumns) continue;
        if (f.norm >= 0 && f.samples * ceil_div(f.units, in) * (f.unit_channels / f.group_channels) > kPhaseStatistics)
          continue;
        f.slices_in = in, f.slices_batch = slices;
        const int room = std::max(1, device.multiprocessors / (in * slices));
        for (int out_slices = std::min(f.row_tiles, room); out_slices >= 1; out_slices--) {
          if (out_slices > 1 && ceil_div(f.row_tiles, out_slices) == ceil_div(f.row_tiles, out_slices - 1)) continue;
          f.slices_out = out_slices;
          f.tiles = f.slices_out * in * slices;
          warps(f);
          if (fixed() + total(needs(f)) > device.shared_bytes) continue;
          const double time = tiling_clocks(f);
          if (best < 0 || time < best) best = time, chosen = f;
        }
      }
    }
    f = chosen;
    return best >= 0;
  }

  // The tiling of a phase that finishes an input: few values a tile, but no more tiles than multiprocessors.
  bool choose_finishing(Phase& f) {
    double best = -1;
    Phase chosen = f;
    for (int in = 1; in <= f.units && whole(f, in); in *= 2) {
      for (int slices = 1; slices <= batch; slices++) {
        f.samples = ceil_div(batch, slices);
        if (ceil_div(batch, f.samples) != slices) continue;
        if (f.norm >= 0 && f.samples * ceil_div(f.units, in) * (f.unit_channels / f.group_channels) > kPhaseStatistics)
          continue;
        if (int64_t{f.samples} * f.times_in * ceil_div(f.channels_in, in) > device.shared_bytes / 4) continue;
        f.slices_in = in, f.slices_batch = slices, f.tiles = in * slices;
        if (fixed() + total(needs(f)) > device.shared_bytes) continue;
        const double time = tiling_clocks(f);
        if (best < 0 || time < best) best = time, chosen = f;
      }
    }
    f = chosen;
    return best >= 0;
  }

  void place(Phase& f, const Conv& conv) {
    const int64_t count = f.slices_in * slice_words(f);
    f.segments[0].out = take(count);
    if (f.num_segments == 2) f.segments[1].out = conv.upsample ? f.segments[0].out : take(count);
  }

  int tail_units() const { return plan.config.down_dims[0] % 32 == 0 ? kFinalGroups : 1; }
  // Partial sums of the 1x1 convolution to the actions, then the scheduler's step, a block a sample.
  void tail(const PhaseSource& value, int norm) {
    Phase f;
    f.kind = PhaseKind::kTail;
    f.value = value;
    const Width dim = plan.config.width(0);
    input(f, dim.channels, tail_units(), horizon, norm, kFinalGroups, dim.own, -1);
    f.slices_in = 1;
    while (f.slices_in < 8 && f.slices_in * 2 <= f.units && whole(f, f.slices_in * 2)) f.slices_in *= 2;
    f.slices_batch = std::min(batch, std::max(1, device.multiprocessors / f.slices_in));
    f.samples = ceil_div(batch, f.slices_batch), f.slices_batch = ceil_div(batch, f.samples);
    while (f.samples > 1 &&
           (f.samples * kFinalGroups > kPhaseStatistics || fixed() + total(needs(f)) > device.shared_bytes))
      f.samples--, f.slices_batch = ceil_div(batch, f.samples);
    f.tiles = f.slices_in * f.slices_batch;
    out.output_slices = f.slices_in;
    out.output_words = take(int64_t{f.slices_in} * batch * horizon * plan.config.action_dim);
    out.phases.push_back(f);
    Phase g;
    g.kind = PhaseKind::kSampler;
    g.slices_batch = g.tiles = batch;
    out.phases.push_back(g);
  }

  void lay_out() {
    PhaseShared& s = out.shared;
    out.ring_slots = slots;
    Places<int> put = {16, kPhaseWarps * slots * phase_slot_bytes(plan.dtype)};
    s.table = put(2 * kPhaseEntry);
    const int prepared = kPhaseCounts + static_cast<int>(out.phases.size()) * kPhaseEntry;  // before the loop
    auto layout = [&](int begin, bool kept) {  // kept: every phase's columns and offsets have a place of their own
      s.bytes = prepared, s.tables_kept = kept;
      for (Phase& f : out.phases) {
        put.at = begin;
        if (kept && f.kind == PhaseKind::kConv) f.shared.columns = put(needs(f).columns), begin = put.at;
      }
      for (Phase& f : out.phases) {
        if (f.kind == PhaseKind::kSampler) continue;
        const Needs n = needs(f);
        put.at = begin;
        const int columns = kept ? f.shared.columns : put(n.columns);
        f.shared = {columns,      put(n.parameters), put(n.sample),    put(n.slab),
                    put(n.stash), put(n.residual),   put(n.statistics)};
        s.bytes = std::max(s.bytes, put.at);
      }
    };
    const int begin = put.at;
    for (const Phase& f : out.phases)
      if (f.kind == PhaseKind::kConv) out.table_bytes += round_up(needs(f).columns, 16);
    layout(begin, true);
    if (s.bytes > device.shared_bytes) layout(begin, false);
    if (s.bytes > device.shared_bytes) out.error = "a tile does not fit into shared memory";
    out.workspace_words = static_cast<int>(words.at);
    for (const Phase& f : out.phases)
      out.warp_runs += f.num_segments * ceil_div(f.tiles, device.multiprocessors) *
                       ceil_div(ceil_div(f.row_tiles, f.slices_out), f.warps_rows);
  }
};

}  // namespace

PhasePlan make_phases(const Plan& plan, int batch, int horizon, const Device& device, Finish finish) {
  constexpr double kTables = 700;  // clocks of a phase that makes its tables
  const auto with = [&](int slots) {
    PhasePlan made = PhaseBuilder(plan, batch, horizon, device, slots).build(finish, 0);
    if (!made.error.empty() || made.shared.tables_kept) return made;
    PhasePlan kept = PhaseBuilder(plan, batch, horizon, device, slots).build(finish, made.table_bytes);
    made.clocks += kTables * static_cast<double>(plan.convs.size());
    return kept.error.empty() && kept.shared.tables_kept && kept.clocks < made.clocks ? kept : made;
  };
  // The fewer, the larger the tiles that fit, but weights come late more often than the model knows.
  constexpr double kMostWorth = 0.95, kWorth = 0.8;
  const int slots = plan.dtype == DType::kFloat32      ? kPhaseWideSlots
                    : plan.dtype == DType::kFloat8E4M3 ? kPhaseE4m3Slots
                                                       : kPhaseSlots;
  PhasePlan made = with(slots), most = with(fewer_slots(slots));
  if (most.error.empty() && (!made.error.empty() || most.clocks < kMostWorth * made.clocks)) return most;
  if (made.error.empty()) return made;
  PhasePlan few = with(kPhaseFewSlots), least = with(kPhaseLeastSlots);
  return !least.error.empty() || (few.error.empty() && few.clocks * kWorth < least.clocks) ? few : least;
}

std::shared_ptr<const PhasePlan> phases_of(const Plan& plan, int batch, int horizon, const Device& device) {
  constexpr size_t kMost = 1024;  // sizes of a process that tries many
  static std::mutex mutex;
  static std::map<std::vector<int>, std::shared_ptr<const PhasePlan>> kept;
  const Config& c = plan.config;
  std::vector<int> key = {
      batch,        horizon,  device.multiprocessors, device.shared_bytes, static_cast<int>(plan.dtype),
      c.action_dim, c.levels, c.kernel_size,          c.num_groups,        c.step_dim,
      c.film_scale};
  key.insert(key.end(), c.down_dims, c.down_dims + c.levels);
  key.insert(key.end(), c.own_dims, c.own_dims + c.levels);
  const std::lock_guard lock(mutex);
  if (kept.size() >= kMost) kept.clear();
  auto& entry = kept[key];
  if (!entry) entry = std::make_shared<const PhasePlan>(make_phases(plan, batch, horizon, device));
  return entry;
}

size_t phase_workspace_bytes(const PhasePlan& plan, const Device& device) {
  return plan.workspace_words * sizeof(uint32_t) +
         static_cast<size_t>(device.multiprocessors) *
             (kPhaseWarps * plan.warp_runs * sizeof(PhaseRun) + plan.phases.size() * kPhaseEntry);
}

}  // namespace dpa::kernels::unet1d
