// The loss, and the backward stages of one sample, in the order of the data. Gradients of weights are added up.
#pragma once
#include "forward.h"

namespace fused {

struct Answer {
  double loss;  // nats; NaN if a logit is not finite
  bool correct;
};

// Cross-entropy of the sample's logits; its gradient, times `scale`, goes to s.logit_gradient.
template <class Task>
Answer cross_entropy(Activations<Task>& s, int label, float scale) {
  FUSED_STAGE("loss");
  const float* logits = s.logits;
  int best = 0;
  for (int c = 1; c < Task::CLASSES; c++)
    if (logits[c] > logits[best]) best = c;
  double powers[Task::CLASSES], sum = 0, not_finite = 0;
  for (int c = 0; c < Task::CLASSES; c++) {
    powers[c] = std::exp(double(logits[c]) - logits[best]);
    sum += powers[c];
    not_finite += 0 * logits[c];  // NaN then, else 0
  }
  for (int c = 0; c < Task::CLASSES; c++) s.logit_gradient[c] = (powers[c] / sum - (c == label)) * scale;
  return {std::log(sum) + logits[best] - logits[label] + not_finite, best == label};
}

// Back through ReLU: the gradient where its output is positive.
FUSED_INLINE Vector where_active(Vector gradient, const float* output) {
  return select(load(output) > 0.0f, gradient, Vector{});
}

// From s.logit_gradient to s.gradient, that of the last block's output before its dropout.
template <class Task>
void classifier_backward(const Parameters<Task>& w, Activations<Task>& s, Parameters<Task>& gradient) {
  FUSED_STAGE("classifier backward, LayerNorm");
  Tile<1> hidden = {};
  multiply_add(hidden, s.logit_gradient, 0, 1, w.fc2[0], WIDTH, Task::CLASSES);
  transform(hidden, [&](Vector v, int, int j) { return where_active(v, &s.classifier_hidden[j]); });
  alignas(ALIGNMENT) float hidden_gradient[WIDTH];
  store_tile(hidden_gradient, WIDTH, hidden);
  Tile<1> pooled = {};
  multiply_add(pooled, hidden_gradient, 0, 1, w.fc1[0], WIDTH, WIDTH);

  const auto add_outer_product = [](const float* out_gradient, int out, const float* x, float* sum) {
    for (int o = 0; o < out; o++)
      for (int j = 0; j < WIDTH; j += LANES)
        store(sum + o * WIDTH + j, load(sum + o * WIDTH + j) + out_gradient[o] * load(x + j));
  };
  add_outer_product(s.logit_gradient, Task::CLASSES, s.classifier_hidden, gradient.fc2[0]);
  add_outer_product(hidden_gradient, WIDTH, s.pooled, gradient.fc1[0]);
  add_row_sum<WIDTH>(1, hidden_gradient, gradient.fc1_bias);
  for (int c = 0; c < Task::CLASSES; c++) gradient.fc2_bias[c] += s.logit_gradient[c];

  transform(pooled, [&](Vector v, int, int) { return v * (1.0f / s.tokens()); });
  for (int t = 0; t < s.tokens(); t++)
    normalise_backward(pooled, s.output, s.dropout[DROPOUT_SITES - 1], s.gradient, t);
}

// s.gradient: in, of the MLP's output; out, of the attention's output before its dropout.
template <class Task, class Weights, class Block>
void mlp_backward(const Weights& w, Activations<Task>& s, const Block& block, const float (*dropout)[WIDTH],
                  Weights& gradient) {
  const int tokens = s.tokens();
  {
    FUSED_STAGE("MLP output, weight gradient");
    add_row_sum<WIDTH>(tokens, s.gradient[0], gradient.fc2_bias);
    add_weight_gradient<WIDTH, MLP_WIDTH>(tokens, s.gradient[0], block.hidden[0], gradient.fc2[0]);
  }
  {
    FUSED_STAGE("MLP hidden gradient");
    linear<WIDTH, MLP_WIDTH>(tokens, s.gradient[0], w.fc2[0], [&](int row, int column, auto& tile) {
      transform(tile, [&](Vector v, int r, int j) { return where_active(v, &block.hidden[row + r][column + j]); });
      store_tile(&s.hidden_gradient[row][column], MLP_WIDTH, tile);
    });
  }
  {
    FUSED_STAGE("MLP hidden, weight gradient");
    add_row_sum<MLP_WIDTH>(tokens, s.hidden_gradient[0], gradient.fc1_bias);
    add_weight_gradient<MLP_WIDTH, WIDTH>(tokens, s.hidden_gradient[0], block.mlp_input.rows[0], gradient.fc1[0]);
  }
  FUSED_STAGE("MLP input gradient, LayerNorm");
  linear<MLP_WIDTH, WIDTH>(tokens, s.hidden_gradient[0], w.fc1[0], [&](int row, int, auto& tile) {
    normalise_backward(tile, block.mlp_input, dropout, s.gradient, row);
  });
}

// s.gradient, of the output projection, to s.heads_gradient.
template <class Task, class Weights, class Block>
void project_heads_backward(const Weights& w, Activations<Task>& s, const Block& block, Weights& gradient) {
  FUSED_STAGE("output projection backward");
  add_weight_gradient<WIDTH, WIDTH>(s.tokens(), s.gradient[0], block.heads[0], gradient.out[0]);
  linear<WIDTH, WIDTH>(s.tokens(), s.gradient[0], w.out[0],
                       [&](int row, int, auto& tile) { store_tile(s.heads_gradient[row], WIDTH, tile); });
}

// s.score_gradient = attention * (values times heads_gradient - its mean under attention), the gradient of softmax's
// input; that mean is the scalar product of a query's head and the head's gradient.
template <class Task, class Block>
void score_backward(Activations<Task>& s, const Block& block, int head) {
  FUSED_STAGE("attention score gradient");
  constexpr int T_PADDED = Activations<Task>::T_PADDED;
  const int tokens = s.tokens(), first_column = head * HEAD_WIDTH;
  const float* head_gradient = &s.heads_gradient[0][first_column];
  transpose_head(tokens, head_gradient, WIDTH, s.transposed[0], T_PADDED);
  FUSED_UNROLL_4
  for (int query = 0; query < tokens; query++) {
    Vector product = {};
    FUSED_UNROLL
    for (int j = 0; j < HEAD_WIDTH; j += LANES)
      product += load(head_gradient + query * WIDTH + j) * load(&block.heads[query][first_column + j]);
    s.by_query[query] = sum_lanes(product)[0];
  }
  const float* values = &block.qkv[0][VALUES + first_column];
  for_row_blocks<TILE_ROWS>(tokens, [&](auto n, int key) {
    constexpr int ROWS = decltype(n)::value;
    FUSED_NO_UNROLL
    for (int query = 0; query < tokens; query += WIDTH) {
      Tile<ROWS> tile = {};
      multiply_add(tile, values + key * QKV, QKV, 1, &s.transposed[0][query], T_PADDED, HEAD_WIDTH);
      transform(tile, [&](Vector v, int r, int j) {
        return (v - load(&s.by_query[query + j])) * load(&block.attention[head][key + r][query + j]);
      });
      store_tile(&s.score_gradient[key][query], T_PADDED, tile);
    }
  });
}

// to [rows][QKV] = factor * matrix times x, or its transpose times x; matrix [rows][T_PADDED], x [rows][x_row].
template <bool TRANSPOSED, class Task>
FUSED_INLINE void multiply_head(const Activations<Task>& s, const float* matrix, const float* x, int x_row, float* to,
                                float factor) {
  constexpr int T_PADDED = Activations<Task>::T_PADDED;
  constexpr int ROW = TRANSPOSED ? 1 : T_PADDED, STEP = TRANSPOSED ? T_PADDED : 1;
  const int tokens = s.tokens();
  for_row_blocks<HEAD_TILE_ROWS>(tokens, [&](auto n, int row) {
    constexpr int ROWS = decltype(n)::value;
    Tile<ROWS, HEAD_VECTORS> tile = {};
    multiply_add(tile, matrix + row * ROW, ROW, STEP, x, x_row, tokens);
    transform(tile, [&](Vector v, int, int) { return v * factor; });
    store_tile(to + row * QKV, QKV, tile);
  });
}

template <class Task, class Block>
void queries_keys_values_gradient(Activations<Task>& s, const Block& block, int head) {
  FUSED_STAGE("queries, keys, values gradient");
  const float* qkv = &block.qkv[0][head * HEAD_WIDTH];
  const float* head_gradient = &s.heads_gradient[0][head * HEAD_WIDTH];
  float* to = &s.qkv_gradient[0][head * HEAD_WIDTH];
  multiply_head<true>(s, s.score_gradient[0], qkv + KEYS, QKV, to + QUERIES, ATTENTION_SCALE);
  // The kept queries carry ATTENTION_SCALE * log2(e).
  multiply_head<false>(s, s.score_gradient[0], qkv + QUERIES, QKV, to + KEYS, LN_2);
  multiply_head<false>(s, block.attention[head][0], head_gradient, WIDTH, to + VALUES, 1.0f);
}

// s.qkv_gradient to s.gradient, that of the block's input before the dropout behind it.
template <class Task, class Weights, class Block>
void attention_input_gradient(const Weights& w, Activations<Task>& s, const Block& block,
                              const float (*dropout)[WIDTH]) {
  FUSED_STAGE("attention input gradient, LayerNorm");
  linear<QKV, WIDTH>(s.tokens(), s.qkv_gradient[0], w.qkv[0], [&](int row, int, auto& tile) {
    normalise_backward(tile, block.attention_input, dropout, s.gradient, row);
  });
}

template <class Task>
void backward(const Parameters<Task>& w, Activations<Task>& s, Parameters<Task>& gradient) {
  classifier_backward(w, s, gradient);
  for (int b = BLOCKS - 1; b >= 0; b--) {
    const auto& block = s.blocks[b];
    mlp_backward(w.blocks[b], s, block, s.dropout[1 + 2 * b], gradient.blocks[b]);
    project_heads_backward(w.blocks[b], s, block, gradient.blocks[b]);
    for (int head = 0; head < HEADS; head++) {
      score_backward(s, block, head);
      queries_keys_values_gradient(s, block, head);
    }
    {
      FUSED_STAGE("queries, keys, values weight gradient");
      add_weight_gradient<QKV, WIDTH>(s.tokens(), s.qkv_gradient[0], block.attention_input.rows[0],
                                      gradient.blocks[b].qkv[0]);
    }
    if (b > 0 || Task::TRAINED_EMBEDDING) attention_input_gradient(w.blocks[b], s, block, s.dropout[2 * b]);
  }
  if constexpr (Task::TRAINED_EMBEDDING) embedding_gradient(s, gradient);
}

}  // namespace fused
