// Reads plain deltas out of a worker's message.
#pragma once

#include <cstdint>
#include <string_view>

#include "wire.hpp"

namespace kvasir {

// The fields of a plain delta; `plain` is false if the delta has any other.
struct Piece {
  std::string_view leg, ids, text;
  std::uint64_t offset = 0;
  bool plain = true;
};

inline Piece read_piece(std::string_view message) {
  Piece piece;
  Fields field(message);
  while (field.next()) {
    if (field.number == 1 && field.kind == Fields::kBytes) {
      piece.leg = field.bytes;
    } else if (field.number == 2 && field.kind == Fields::kVarint) {
      piece.plain = piece.plain && field.value == 0;
    } else if (field.number == 3 && field.kind == Fields::kVarint) {
      piece.offset = field.value;
    } else if (field.number == 4 && field.kind == Fields::kBytes && piece.ids.empty()) {
      piece.ids = field.bytes;
    } else if (field.number == 5 && field.kind == Fields::kBytes) {
      piece.text = field.bytes;
    } else {
      piece.plain = false;
    }
  }
  piece.plain = piece.plain && !field.broken();
  return piece;
}

// Finds the only message in field `number` of `message`; false if there is none or more than one.
inline bool inner(std::string_view message, std::uint32_t number, std::string_view &out) {
  std::string_view found;
  bool there = false;
  Fields field(message);
  while (field.next()) {
    if (field.number != number || field.kind != Fields::kBytes) continue;
    if (there) return false;
    there = true;
    found = field.bytes;
  }
  out = found;
  return there && !field.broken();
}

}  // namespace kvasir
