// LayerNorm without affine parameters (eps 1e-5), forward and backward, on a tile in registers.
#pragma once
#include "tiles.h"

namespace fused {

// Normalise the rows of a tile; keep them, and 1 / standard deviation, from row `first` on.
template <int ROWS, class Normalised>
FUSED_INLINE void normalise(Tile<ROWS>& tile, Normalised& kept, int first) {
  FUSED_UNROLL
  for (int r = 0; r < ROWS; r++) {
    Vector sum = {}, squares = {};
    FUSED_UNROLL
    for (int j = 0; j < ROW_VECTORS; j++) sum += tile[r][j];
    const Vector mean = sum_lanes(sum) * (1.0f / WIDTH);
    FUSED_UNROLL
    for (int j = 0; j < ROW_VECTORS; j++) {
      tile[r][j] -= mean;
      squares += tile[r][j] * tile[r][j];
    }
    const float rstd = 1.0f / std::sqrt(sum_lanes(squares)[0] * (1.0f / WIDTH) + 1e-5f);
    kept.rstd[first + r] = rstd;
    FUSED_UNROLL
    for (int j = 0; j < ROW_VECTORS; j++) store(&kept.rows[first + r][j * LANES], tile[r][j] * rstd);
  }
}

// From the gradient of a LayerNorm's output (the tile) to that of its input, and on through the dropout before it.
template <int ROWS, class Normalised>
FUSED_INLINE void normalise_backward(const Tile<ROWS>& tile, const Normalised& kept, const float (*dropout)[WIDTH],
                                     float (*gradient)[WIDTH], int first) {
  FUSED_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int t = first + r;
    Vector y[ROW_VECTORS], sum = {}, along = {};
    FUSED_UNROLL
    for (int j = 0; j < ROW_VECTORS; j++) {
      y[j] = load(&kept.rows[t][j * LANES]);
      sum += tile[r][j];
      along += tile[r][j] * y[j];
    }
    const Vector mean = sum_lanes(sum) * (1.0f / WIDTH);
    const Vector slope = sum_lanes(along) * (1.0f / WIDTH);
    FUSED_UNROLL
    for (int j = 0; j < ROW_VECTORS; j++) {
      const Vector before = (tile[r][j] - mean - y[j] * slope) * kept.rstd[t];
      store(&gradient[t][j * LANES], before * load(&dropout[t][j * LANES]));
    }
  }
}

}  // namespace fused
