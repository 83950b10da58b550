// From bytes or word ids to the first LayerNorm's output, and the dropout numbers.
#pragma once
#include "layernorm.h"
#include "profile.h"

namespace fused {

// The factors of dropout, from generators.streams.dropout_numbers: a hash of the key and a counter gives two numbers
// of 16 bits, for channels j and j + WIDTH / 2; below the threshold a unit is dropped.
struct Dropout {
  uint32_t key_low, key_high;
  uint32_t threshold;
  float kept_scale;
  uint32_t max_tokens;  // of the task, part of the counter
};

template <class Task>
void draw_dropout(Activations<Task>& s, const Dropout& dropout, uint32_t sample) {
  FUSED_STAGE("dropout numbers");
  constexpr int HALF = WIDTH / 2;
  const int tokens = s.tokens();
  const IntVector threshold = (int32_t)dropout.threshold - IntVector{};
  const IntVector kept = (IntVector)splat(dropout.kept_scale);
  for (uint32_t site = 0; site < DROPOUT_SITES; site++) {
    for (int t = 0; t < tokens; t++) {
      const uint32_t row = (sample * DROPOUT_SITES + site) * dropout.max_tokens + t;
      FUSED_UNROLL
      for (int j = 0; j < HALF; j += LANES) {
        UintVector h = lane_numbers() + (row * HALF + j + dropout.key_low);
        h ^= h >> 16;
        h *= 0x7FEB352Du;
        h ^= dropout.key_high;
        h ^= h >> 15;
        h *= 0x846CA68Bu;
        h ^= h >> 16;
        const IntVector low = (IntVector)(h & 0xFFFFu), high = (IntVector)(h >> 16);
        store(&s.dropout[site][t][j], (Vector)((low >= threshold) & kept));
        store(&s.dropout[site][t][j + HALF], (Vector)((high >= threshold) & kept));
      }
    }
  }
}

template <int ROWS>
FUSED_INLINE void apply_dropout(Tile<ROWS>& tile, const float (*dropout)[WIDTH], int first) {
  transform(tile, [&](Vector v, int r, int column) { return v * load(&dropout[first + r][column]); });
}

// The embedding's dropout, then the first LayerNorm.
template <bool TRAINING, int ROWS, class Task>
FUSED_INLINE void finish_embedding(Tile<ROWS>& tile, Activations<Task>& s, int first) {
  if constexpr (TRAINING) apply_dropout(tile, s.dropout[0], first);
  normalise(tile, s.blocks[0].attention_input, first);
}

// Cut the window out of the padded image: 49 patches in rows of 16 numbers, scaled to [-1, 1].
inline void cut_patches(const Images::Sample& sample, Images::Input& input) {
  FUSED_STAGE("crop and patches");
  constexpr int SIDE = Images::SIDE, PATCH = Images::PATCH, GRID = SIDE / PATCH;
  for (int row = 0; row < SIDE; row++)
    std::memcpy(&input.padded[Images::PADDING + row][Images::PADDING], sample.image + row * SIDE, SIDE);
  alignas(ALIGNMENT) uint8_t bytes[GRID][GRID][PATCH][PATCH];
  for (int row = 0; row < SIDE; row++)
    for (int patch = 0; patch < GRID; patch++)
      std::memcpy(bytes[row / PATCH][patch][row % PATCH],
                  &input.padded[sample.row_offset + row][sample.column_offset + patch * PATCH], PATCH);
  const uint8_t* from = &bytes[0][0][0][0];
  for (int i = 0; i < SIDE * SIDE; i += LANES) {
    const ByteVector pixels = *reinterpret_cast<const ByteVector*>(from + i);
    store(&input.patches[0][0] + i, __builtin_convertvector(pixels, Vector) * (2.0f / 255) - 1.0f);
  }
}

template <bool TRAINING>
void embed(const ForwardWeights<Images>& w, const Images::Sample& sample, Activations<Images>& s) {
  cut_patches(sample, s.input);
  FUSED_STAGE("embedding, LayerNorm");
  linear<Images::PATCH_PIXELS, WIDTH>(s.tokens(), s.input.patches[0], w.patch[0], [&](int t, int, auto& tile) {
    transform(tile, [&](Vector v, int r, int column) { return v + load(&w.offset[t + r][column]); });
    finish_embedding<TRAINING>(tile, s, t);
  });
}

template <bool TRAINING, int CAPACITY>
void embed(const ForwardWeights<Texts<CAPACITY>>&, const typename Texts<CAPACITY>::Sample& sample,
           Activations<Texts<CAPACITY>>& s) {
  FUSED_STAGE("embedding, LayerNorm");
  for (int t = 0; t < s.tokens(); t++) {
    const float* vector = sample.vectors + (int64_t)sample.words[t] * WIDTH;
    const float* position = sample.positions + t * WIDTH;
    Tile<1> tile;
    transform(tile, [&](Vector, int, int column) {
      return load_unaligned(vector + column) + load_unaligned(position + column);
    });
    finish_embedding<TRAINING>(tile, s, t);
  }
}

// s.gradient is that of the embedding.
inline void embedding_gradient(const Activations<Images>& s, Parameters<Images>& gradient) {
  FUSED_STAGE("embedding gradient");
  add_row_sum<WIDTH>(s.tokens(), s.gradient[0], gradient.patch_bias);
  add_weight_gradient<WIDTH, Images::PATCH_PIXELS>(s.tokens(), s.gradient[0], s.input.patches[0], gradient.patch[0]);
}

}  // namespace fused
