// GFLOP/s of the fused engine's own matrix product, all operands in the first-level cache: the bound for its stages.
#include <chrono>
#include <cstdio>

#include "tiles.h"

int main() {
  using namespace fused;
  constexpr int ROWS = 49, SIZE = 64, PRODUCTS = 100000, ROUNDS = 5;
  alignas(ALIGNMENT) static float x[ROWS * SIZE], matrix[SIZE * SIZE], product[ROWS * SIZE];
  double best = 0;
  for (int round = 0; round < ROUNDS; round++) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < PRODUCTS; i++) {
      linear<SIZE, SIZE>(ROWS, x, matrix, [&](int row, int column, auto& tile) {
        store_tile(product + row * SIZE + column, SIZE, tile);
      });
      asm volatile("" ::: "memory");  // each product counts
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * ROWS * SIZE * SIZE * PRODUCTS / seconds.count());
  }
  std::printf("%.1f\n", best / 1e9);
}
