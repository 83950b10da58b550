// The forward stages of one sample, in the order of the data. TRAINING adds dropout.
#pragma once
#include "embedding.h"

namespace fused {

template <class Task>
void ForwardWeights<Task>::prepare(const Parameters<Task>& weights, const float* positions) {
  FUSED_STAGE("prepare weights");
  // [out][in] to columns `to` of [in][row_step]
  const auto transpose = [](const float* from, int out, int in, float* to, int row_step, float factor = 1.0f) {
    for (int i = 0; i < in; i++)
      for (int o = 0; o < out; o++) to[i * row_step + o] = from[o * in + i] * factor;
  };
  if constexpr (Task::TRAINED_EMBEDDING) {
    transpose(weights.patch[0], WIDTH, Task::PATCH_PIXELS, this->patch[0], WIDTH);
    for (int t = 0; t < Task::MAX_TOKENS; t++)
      for (int j = 0; j < WIDTH; j++) this->offset[t][j] = weights.patch_bias[j] + positions[t * WIDTH + j];
  }
  for (int b = 0; b < BLOCKS; b++) {
    const auto& from = weights.blocks[b];
    Block& to = blocks[b];
    transpose(from.qkv[QUERIES], WIDTH, WIDTH, to.qkv[0] + QUERIES, QKV, ATTENTION_SCALE * LOG2_E);
    transpose(from.qkv[KEYS], 2 * WIDTH, WIDTH, to.qkv[0] + KEYS, QKV);  // and values
    transpose(from.out[0], WIDTH, WIDTH, to.out[0], WIDTH);
    transpose(from.fc1[0], MLP_WIDTH, WIDTH, to.fc1[0], MLP_WIDTH);
    transpose(from.fc2[0], WIDTH, MLP_WIDTH, to.fc2[0], WIDTH);
    std::memcpy(to.fc1_bias, from.fc1_bias, sizeof to.fc1_bias);
    std::memcpy(to.fc2_bias, from.fc2_bias, sizeof to.fc2_bias);
  }
  transpose(weights.fc1[0], WIDTH, WIDTH, fc1[0], WIDTH);
  transpose(weights.fc2[0], Task::CLASSES, WIDTH, fc2[0], MAX_CLASSES);
  std::memcpy(fc1_bias, weights.fc1_bias, sizeof fc1_bias);
  std::memcpy(fc2_bias, weights.fc2_bias, sizeof weights.fc2_bias);
}

template <class Task, class BlockWeights, class Block>
void project_queries_keys_values(const BlockWeights& w, const Activations<Task>& s, Block& block) {
  FUSED_STAGE("queries, keys, values");
  linear<WIDTH, QKV>(s.tokens(), block.attention_input.rows[0], w.qkv[0],
                     [&](int row, int column, auto& tile) { store_tile(&block.qkv[row][column], QKV, tile); });
}

// attention[head][key][query] = scalar product of the two, in bits: softmax will be a power of 2. On the way, the
// largest score of each query. Queries stand side by side in vectors, so that softmax needs no sum over lanes.
template <class Task, class Block>
void score_keys(Activations<Task>& s, Block& block, int head) {
  FUSED_STAGE("attention scores");
  constexpr int T_PADDED = Activations<Task>::T_PADDED;
  const int tokens = s.tokens();
  transpose_head(tokens, &block.qkv[0][QUERIES + head * HEAD_WIDTH], QKV, s.transposed[0], T_PADDED);
  for (int query = 0; query < tokens; query += LANES) store(&s.by_query[query], splat(-INFINITY));
  const float* keys = &block.qkv[0][KEYS + head * HEAD_WIDTH];
  for_row_blocks<TILE_ROWS>(tokens, [&](auto n, int key) {
    constexpr int ROWS = decltype(n)::value;
    FUSED_NO_UNROLL
    for (int query = 0; query < tokens; query += WIDTH) {
      Tile<ROWS> tile = {};
      multiply_add(tile, keys + key * QKV, QKV, 1, &s.transposed[0][query], T_PADDED, HEAD_WIDTH);
      store_tile(&block.attention[head][key][query], T_PADDED, tile);
      FUSED_UNROLL
      for (int j = 0; j < ROW_VECTORS; j++) {
        Vector largest = load(&s.by_query[query + j * LANES]);
        FUSED_UNROLL
        for (int r = 0; r < ROWS; r++) largest = elementwise_max(largest, tile[r][j]);
        store(&s.by_query[query + j * LANES], largest);
      }
    }
  });
}

// Softmax over the keys of each query; s.by_query holds the largest scores.
template <class Task, class Block>
void softmax(const Activations<Task>& s, Block& block, int head) {
  FUSED_STAGE("softmax");
  const int tokens = s.tokens();
  for (int query = 0; query < tokens; query += LANES) {
    const Vector largest = load(&s.by_query[query]);
    Vector sum = {};
    FUSED_UNROLL_4
    for (int key = 0; key < tokens; key++) {
      float* score = &block.attention[head][key][query];
      const Vector power = exp2_of_negative(load(score) - largest);
      store(score, power);
      sum += power;
    }
    const Vector factor = 1.0f / sum;
    FUSED_UNROLL_4
    for (int key = 0; key < tokens; key++) {
      float* power = &block.attention[head][key][query];
      store(power, load(power) * factor);
    }
  }
}

template <class Task, class Block>
void weigh_values(const Activations<Task>& s, Block& block, int head) {
  FUSED_STAGE("attention times values");
  constexpr int T_PADDED = Activations<Task>::T_PADDED;
  const int tokens = s.tokens();
  const float* values = &block.qkv[0][VALUES + head * HEAD_WIDTH];
  for_row_blocks<HEAD_TILE_ROWS>(tokens, [&](auto n, int row) {
    constexpr int ROWS = decltype(n)::value;
    Tile<ROWS, HEAD_VECTORS> tile = {};
    multiply_add(tile, &block.attention[head][0][row], 1, T_PADDED, values, QKV, tokens);
    store_tile(&block.heads[row][head * HEAD_WIDTH], WIDTH, tile);
  });
}

template <bool TRAINING, class Task, class BlockWeights, class Block>
void project_heads(const BlockWeights& w, const Activations<Task>& s, Block& block, const float (*dropout)[WIDTH]) {
  FUSED_STAGE("output projection, LayerNorm");
  linear<WIDTH, WIDTH>(s.tokens(), block.heads[0], w.out[0], [&](int row, int, auto& tile) {
    if constexpr (TRAINING) apply_dropout(tile, dropout, row);
    normalise(tile, block.mlp_input, row);
  });
}

template <class Task, class BlockWeights, class Block>
void mlp_hidden(const BlockWeights& w, const Activations<Task>& s, Block& block) {
  FUSED_STAGE("MLP hidden");
  linear<WIDTH, MLP_WIDTH>(s.tokens(), block.mlp_input.rows[0], w.fc1[0], [&](int row, int column, auto& tile) {
    transform(tile, [&](Vector v, int, int j) { return elementwise_max(Vector{}, v + load(&w.fc1_bias[column + j])); });
    store_tile(&block.hidden[row][column], MLP_WIDTH, tile);
  });
}

template <bool TRAINING, class Task, class BlockWeights, class Block>
void mlp_output(const BlockWeights& w, const Activations<Task>& s, const Block& block, const float (*dropout)[WIDTH],
                typename Activations<Task>::Normalised& output) {
  FUSED_STAGE("MLP output, LayerNorm");
  linear<MLP_WIDTH, WIDTH>(s.tokens(), block.hidden[0], w.fc2[0], [&](int row, int, auto& tile) {
    transform(tile, [&](Vector v, int, int column) { return v + load(&w.fc2_bias[column]); });
    if constexpr (TRAINING) apply_dropout(tile, dropout, row);
    normalise(tile, output, row);
  });
}

// Mean over tokens, then the two layers of the classifier.
template <class Task>
void classify(const ForwardWeights<Task>& w, Activations<Task>& s) {
  FUSED_STAGE("mean, classifier");
  constexpr int LOGIT_VECTORS = MAX_CLASSES / LANES;
  std::memset(s.pooled, 0, sizeof s.pooled);
  add_row_sum<WIDTH>(s.tokens(), s.output.rows[0], s.pooled);
  for (float& x : s.pooled) x *= 1.0f / s.tokens();

  Tile<1> hidden = {};
  multiply_add(hidden, s.pooled, 0, 1, w.fc1[0], WIDTH, WIDTH);
  transform(hidden, [&](Vector v, int, int j) { return elementwise_max(Vector{}, v + load(&w.fc1_bias[j])); });
  store_tile(s.classifier_hidden, WIDTH, hidden);

  Tile<1, LOGIT_VECTORS> logits = {};
  multiply_add(logits, s.classifier_hidden, 0, 1, w.fc2[0], MAX_CLASSES, WIDTH);
  transform(logits, [&](Vector v, int, int j) { return v + load(&w.fc2_bias[j]); });
  store_tile(s.logits, MAX_CLASSES, logits);
}

template <bool TRAINING, class Task>
void forward(const ForwardWeights<Task>& w, const typename Task::Sample& sample, Activations<Task>& s) {
  embed<TRAINING>(w, sample, s);
  for (int b = 0; b < BLOCKS; b++) {
    auto& block = s.blocks[b];
    project_queries_keys_values(w.blocks[b], s, block);
    for (int head = 0; head < HEADS; head++) {
      score_keys(s, block, head);
      softmax(s, block, head);
      weigh_values(s, block, head);
    }
    project_heads<TRAINING>(w.blocks[b], s, block, s.dropout[1 + 2 * b]);
    mlp_hidden(w.blocks[b], s, block);
    mlp_output<TRAINING>(w.blocks[b], s, block, s.dropout[2 + 2 * b],
                         b + 1 < BLOCKS ? s.blocks[b + 1].attention_input : s.output);
  }
  classify(w, s);
}

}  // namespace fused
