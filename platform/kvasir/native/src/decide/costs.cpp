// Terms of the cost of each place, and of each pair of places. Every operation rounds as numpy's does, in the
// same order, so that decisions are those of the Python twin to the last bit: no operation may be contracted,
// which the build sees to.
#include "costs.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

namespace py = pybind11;

namespace kvasir {
namespace {

using Floats = py::array_t<double, py::array::c_style | py::array::forcecast>;
using Counts = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

constexpr double kShortestS = 1e-9;  // avoids division by zero for a promised time of zero

enum Term { kTransfer, kStep, kLink, kDecodeSlo, kMemory, kDecode, kQueue, kLoad, kPrefill, kPrefillSlo, kWork,
            kDisplace, kStall, kMissing, kTerms };

// The weight of a second of a wait: it grows as the wait nears what is promised.
struct Urgency {
  Urgency(double promised_s, double within, double steepest)
      : per_promised(1.0 / std::max(promised_s, kShortestS)), within(within), steepest(steepest) {}
  double of(double seconds) const { return std::min(seconds * per_promised, steepest) + within; }
  double per_promised, within, steepest;
};

template <typename Array, std::size_t... At>
std::array<Array, sizeof...(At)> each_of(const py::tuple &given, std::index_sequence<At...>) {
  return {Array::ensure(given[At])...};
}

template <typename Array, std::size_t N>
std::array<Array, N> columns(const py::tuple &given, const char *what) {
  if (given.size() != N) throw py::value_error(std::string(what) + " must be " + std::to_string(N) + " columns");
  auto found = each_of<Array>(given, std::make_index_sequence<N>());
  for (const auto &each : found)
    if (!each) throw py::value_error(std::string(what) + " must be columns of numbers");
  return found;
}

void check(const py::array &column, py::ssize_t places, py::ssize_t width = 1) {
  if (column.size() != places * width) throw py::value_error("columns must have an item for each place");
}

// What is worth fetching from lower tiers, each considered only below the ones above it.
struct Fetched {
  double tokens = 0.0, seconds = 0.0;
};

Fetched from_tiers(const std::int64_t *tokens, const double *fixed_s, const double *byte_s, py::ssize_t tiers,
                   double token_bytes, double token_s) {
  Fetched sum, best;
  double saved = 0.0, most = 0.0;
  for (py::ssize_t tier = 0; tier < tiers; ++tier) {
    const auto count = static_cast<double>(tokens[tier]);
    const double seconds =
        count * token_bytes * byte_s[tier] + fixed_s[tier] * static_cast<double>(std::min<std::int64_t>(tokens[tier], 1));
    saved += count * token_s - seconds;
    sum = {sum.tokens + count, sum.seconds + seconds};
    if (tier == 0 || saved > most) {
      most = saved;
      best = sum;
    }
  }
  return most > 0.0 ? best : Fetched{};
}

Floats cost_terms(const py::tuple &counts, const Floats &kv_token_bytes, const py::tuple &rates,
                  const std::array<double, 4> &request, const std::array<double, 6> &weights, bool whole) {
  const auto [prompt, output, choices, promised_s] = request;
  const auto [within, steepest, a_stream, of_work, reuse, per_chunk] = weights;
  const auto [cached, tiers, queued, waiting, streams, reserved, held, kv_tokens] = columns<Counts, 8>(counts, "counts");
  const auto [prefill_fixed, prefill_token, step_fixed, step_stream, transfer_fixed, transfer_byte, tier_fixed,
              tier_byte] = columns<Floats, 8>(rates, "rates");
  const py::ssize_t places = cached.size(), below = tiers.ndim() == 2 ? tiers.shape(1) : 0;
  for (const auto *each : {&queued, &waiting, &streams, &reserved, &held, &kv_tokens}) check(*each, places);
  for (const auto *each : {&prefill_fixed, &prefill_token, &step_fixed, &step_stream, &transfer_fixed, &transfer_byte,
                           &kv_token_bytes})
    check(*each, places);
  check(tiers, places, below);
  check(tier_fixed, places, below);
  check(tier_byte, places, below);

  Floats result({static_cast<py::ssize_t>(kTerms), places});
  std::array<double *, kTerms> term;
  for (int row = 0; row < kTerms; ++row) term[row] = result.mutable_data(row, 0);

  double running_streams = 0.0, waited_s = 0.0;
  for (py::ssize_t at = 0; at < places; ++at) {
    const auto decoding = static_cast<double>(streams.data()[at]);
    running_streams += decoding;
    const double running = step_fixed.data()[at] + step_stream.data()[at] * decoding;
    term[kStep][at] = running + step_stream.data()[at] * choices;
    waited_s += decoding * term[kStep][at];
  }
  const double itl_s = running_streams ? waited_s / running_streams : 0.0;
  // By each place's own ITL, requests would leave their prefixes for emptier batches.
  const double used = std::min(itl_s / std::max(promised_s, kShortestS), steepest);
  const double of_decode = a_stream * (within + used) * output * choices;
  const double per_output = 1.0 / std::max(output, 1.0);
  const Urgency urgency(promised_s, within, steepest);

  for (py::ssize_t at = 0; at < places; ++at) {
    const auto decoding = static_cast<double>(streams.data()[at]);
    const double of_streams = step_stream.data()[at] * decoding, fixed_s = prefill_fixed.data()[at];
    const double step = term[kStep][at];
    const double token_s =
        std::min(decoding, 1.0) * (step_fixed.data()[at] + of_streams) * per_chunk + prefill_token.data()[at];
    const auto before = static_cast<double>(queued.data()[at]);
    const double chunks = std::min(static_cast<double>(waiting.data()[at]), before * per_chunk + 1.0);
    const double queue = before * token_s + chunks * fixed_s;
    double missing = prompt - static_cast<double>(cached.data()[at]);
    const double token_bytes = kv_token_bytes.data()[at];
    const double transfer = missing * token_bytes * transfer_byte.data()[at] + transfer_fixed.data()[at];
    const Fetched fetched = from_tiers(tiers.data() + at * below, tier_fixed.data() + at * below,
                                       tier_byte.data() + at * below, below, token_bytes, token_s);
    missing -= fetched.tokens;
    const double prefill = missing * token_s + fixed_s;
    const double capacity = std::max(static_cast<double>(kv_tokens.data()[at]), 1.0);
    const double fullness = std::min(static_cast<double>(held.data()[at]) / capacity, 1.0) * reuse;
    const double excess =
        prompt + output * choices + static_cast<double>(reserved.data()[at]) - capacity;
    const double backlog = (queue + prefill) * per_output + step;

    term[kTransfer][at] = transfer;
    term[kLink][at] = transfer * of_work;
    // Streams end, and free their KV, about once in the time of an output.
    term[kMemory][at] = excess > 0.0 ? excess / capacity * (step * output) : 0.0;
    term[kDecode][at] = (step + of_streams) * of_decode;
    term[kQueue][at] = queue;
    term[kLoad][at] = fetched.seconds;
    term[kPrefill][at] = prefill;
    term[kWork][at] = prefill * of_work;
    term[kDisplace][at] = prefill * fullness;
    // Streams there also wait for what is queued before this prompt: that brings them nearer to their promised
    // ITL, and all of it is spread over an output like this one.
    const double stall = missing * prefill_token.data()[at] * decoding * urgency.of(backlog) * a_stream;
    term[kStall][at] = whole ? stall : 0.0;
    term[kMissing][at] = missing;
    term[kDecodeSlo][at] = term[kPrefillSlo][at] = 0.0;
  }
  return result;
}

py::tuple cost_pairs(const Floats &terms, const Counts &prefills, const Counts &decodes, const py::object &excess_s,
                     const std::array<double, 4> &promise) {
  const auto [promised_s, within, steepest, of_work] = promise;
  const Urgency urgency(promised_s, within, steepest);
  if (terms.ndim() != 2 || terms.shape(0) != kTerms) throw py::value_error("terms are those of cost_terms");
  const py::ssize_t places = terms.shape(1), rows = prefills.size(), width = decodes.size();
  for (const auto *each : {&prefills, &decodes})
    for (py::ssize_t at = 0; at < each->size(); ++at)
      if (each->data()[at] < 0 || each->data()[at] >= places) throw py::value_error("a row is none of a place");
  const auto excess = excess_s.is_none() ? py::object() : py::object(Floats::ensure(excess_s));
  if (!excess_s.is_none()) {
    if (!excess) throw py::value_error("excess_s must be numbers");
    check(py::array(excess), rows, width);
  }
  const double *more = excess ? static_cast<const double *>(py::array(excess).data()) : nullptr;
  Floats ttft({rows, width}), waits({rows, width}), costs({rows, width});
  const auto term = [&terms](Term row, std::int64_t place) { return *terms.data(row, place); };
  for (py::ssize_t i = 0; i < rows; ++i) {
    const std::int64_t from = prefills.data()[i];
    const double before = term(kQueue, from) + term(kLoad, from) + term(kPrefill, from);
    const double others = term(kWork, from) + term(kDisplace, from) + term(kStall, from);
    for (py::ssize_t j = 0; j < width; ++j) {
      const std::int64_t to = decodes.data()[j];
      const py::ssize_t at = i * width + j;
      const double more_s = more ? more[at] : 0.0;
      const double first_s = before + (term(kTransfer, to) + term(kMemory, to) + term(kStep, to)) + more_s;
      const double wait = urgency.of(first_s) * first_s;
      ttft.mutable_data()[at] = first_s;
      waits.mutable_data()[at] = wait - first_s;
      costs.mutable_data()[at] = wait + others + (term(kLink, to) + term(kDecode, to)) + more_s * of_work;
    }
  }
  return py::make_tuple(ttft, waits, costs);
}

}  // namespace

void bind_costs(py::module_ &m) {
  m.def("cost_terms", &cost_terms, py::arg("counts"), py::arg("kv_token_bytes"), py::arg("rates"), py::arg("request"),
        py::arg("weights"), py::kw_only(), py::arg("whole"));
  m.def("cost_pairs", &cost_pairs, py::arg("terms"), py::arg("prefills"), py::arg("decodes"), py::arg("excess_s"),
        py::arg("promise"));
}

}  // namespace kvasir
