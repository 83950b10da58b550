// Matrix products by tiles of registers.
//
// A tile is some rows x WIDTH columns of a product, summed up in registers over the inner dimension and then handed,
// still in registers, to the caller's `finish`. Sums run over the inner dimension in order, for each entry alone, so
// neither the tile's height nor what stands beside an entry changes it.
#pragma once
#include <type_traits>

#include "network.h"

namespace fused {

constexpr int ROW_VECTORS = WIDTH / LANES;
constexpr int HEAD_VECTORS = HEAD_WIDTH / LANES;

// Heights of tiles, found by measuring: sums, factors and a row of the second matrix share 32 registers (AVX-512, Arm)
// or 16.
#ifdef __aarch64__
constexpr bool LARGE = true;
#else
constexpr bool LARGE = LANES > 4;
#endif
constexpr int TILE_ROWS = LANES == 16 ? 7 : LARGE ? 2 : 1;
constexpr int HEAD_TILE_ROWS = LANES == 16 ? 14 : LARGE ? 6 : 2;
constexpr int GRADIENT_ROWS = LANES == 16 ? 8 : LARGE ? 2 : 1;

template <int ROWS, int VECTORS = ROW_VECTORS>
using Tile = Vector[ROWS][VECTORS];

// tile[r][:] += sum over k < depth of a[r * a_row + k * a_step] * b[k * b_step + :]
template <int ROWS, int VECTORS>
FUSED_INLINE void multiply_add(Tile<ROWS, VECTORS>& tile, const float* a, int a_row, int a_step, const float* b,
                               int b_step, int depth) {
  FUSED_UNROLL_4
  for (int k = 0; k < depth; k++) {
    Vector row[VECTORS];
    FUSED_UNROLL
    for (int j = 0; j < VECTORS; j++) row[j] = load(b + k * b_step + j * LANES);
    FUSED_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const Vector factor = splat(a[r * a_row + k * a_step]);
      FUSED_UNROLL
      for (int j = 0; j < VECTORS; j++) tile[r][j] += factor * row[j];
    }
  }
}

// Replace each vector v of a tile by change(v, row of the tile, column of its first lane).
template <int ROWS, int VECTORS, class Change>
FUSED_INLINE void transform(Tile<ROWS, VECTORS>& tile, Change change) {
  FUSED_UNROLL
  for (int r = 0; r < ROWS; r++) {
    FUSED_UNROLL
    for (int j = 0; j < VECTORS; j++) tile[r][j] = change(tile[r][j], r, j * LANES);
  }
}

template <int ROWS, int VECTORS>
FUSED_INLINE void store_tile(float* to, int row_step, const Tile<ROWS, VECTORS>& tile) {
  FUSED_UNROLL
  for (int r = 0; r < ROWS; r++) {
    FUSED_UNROLL
    for (int j = 0; j < VECTORS; j++) store(to + r * row_step + j * LANES, tile[r][j]);
  }
}

template <int ROWS>
using Rows = std::integral_constant<int, ROWS>;

template <int ROWS, class Work>
FUSED_INLINE void last_rows(int count, int first, Work& work) {
  if constexpr (ROWS > 0) {
    if (count == ROWS)
      work(Rows<ROWS>{}, first);
    else
      last_rows<ROWS - 1>(count, first, work);
  }
}

// Call work(Rows<n>, first row) for blocks that cover 0 to rows - 1: HEIGHT rows each, then at most two for the rest.
template <int HEIGHT, class Work>
FUSED_INLINE void for_row_blocks(int rows, Work work) {
  int first = 0;
  FUSED_NO_UNROLL
  for (; first + HEIGHT <= rows; first += HEIGHT) work(Rows<HEIGHT>{}, first);
  constexpr int HALF = HEIGHT / 2;
  if constexpr (HEIGHT > 8) {
    if (first + HALF <= rows) {
      work(Rows<HALF>{}, first);
      first += HALF;
    }
    last_rows<HEIGHT - HALF - 1>(rows - first, first, work);
  } else {
    last_rows<HEIGHT - 1>(rows - first, first, work);
  }
}

// x [rows][IN] times matrix [IN][OUT]; finish(first row, first column, tile) gets tiles of WIDTH columns.
template <int IN, int OUT, class Finish>
FUSED_INLINE void linear(int rows, const float* x, const float* matrix, Finish finish) {
  for_row_blocks<TILE_ROWS>(rows, [&](auto n, int row) {
    constexpr int ROWS = decltype(n)::value;
    FUSED_NO_UNROLL
    for (int column = 0; column < OUT; column += WIDTH) {
      Tile<ROWS> tile = {};
      multiply_add(tile, x + row * IN, IN, 1, matrix + column, OUT, IN);
      finish(row, column, tile);
    }
  });
}

// gradient [OUT][IN] += transpose of out_gradient [rows][OUT] times x [rows][IN]
template <int OUT, int IN>
FUSED_INLINE void add_weight_gradient(int rows, const float* out_gradient, const float* x, float* gradient) {
  constexpr int COLUMNS = IN < WIDTH ? IN : WIDTH, VECTORS = COLUMNS / LANES;
  FUSED_NO_UNROLL
  for (int out = 0; out < OUT; out += GRADIENT_ROWS) {
    FUSED_NO_UNROLL
    for (int column = 0; column < IN; column += COLUMNS) {
      Tile<GRADIENT_ROWS, VECTORS> tile = {};
      multiply_add(tile, out_gradient + out, 1, OUT, x + column, IN, rows);
      FUSED_UNROLL
      for (int r = 0; r < GRADIENT_ROWS; r++) {
        FUSED_UNROLL
        for (int j = 0; j < VECTORS; j++) {
          float* sum = gradient + (out + r) * IN + column + j * LANES;
          store(sum, load(sum) + tile[r][j]);
        }
      }
    }
  }
}

// sum [COLUMNS] += sum of the rows of x [rows][COLUMNS]
template <int COLUMNS>
FUSED_INLINE void add_row_sum(int rows, const float* x, float* sum) {
  constexpr int VECTORS = COLUMNS / LANES;
  Vector total[VECTORS];
  FUSED_UNROLL
  for (int j = 0; j < VECTORS; j++) total[j] = load(sum + j * LANES);
  FUSED_NO_UNROLL
  for (int row = 0; row < rows; row++) {
    FUSED_UNROLL
    for (int j = 0; j < VECTORS; j++) total[j] += load(x + row * COLUMNS + j * LANES);
  }
  FUSED_UNROLL
  for (int j = 0; j < VECTORS; j++) store(sum + j * LANES, total[j]);
}

// HEAD_WIDTH columns of x, rows x_row apart, to `to` [HEAD_WIDTH][to_row]; rows are read in blocks of LANES.
FUSED_INLINE void transpose_head(int rows, const float* x, int x_row, float* to, int to_row) {
  FUSED_NO_UNROLL
  for (int row = 0; row < rows; row += LANES) {
    FUSED_NO_UNROLL
    for (int column = 0; column < HEAD_WIDTH; column += LANES) {
      Vector block[LANES];
      FUSED_UNROLL
      for (int i = 0; i < LANES; i++) block[i] = load(x + (row + i) * x_row + column);
      transpose_lanes(block);
      FUSED_UNROLL
      for (int i = 0; i < LANES; i++) store(to + (column + i) * to_row + row, block[i]);
    }
  }
}

}  // namespace fused
