// The small transformer as the kernels see it: its two kinds of input, its weights, and what one sample keeps.
//
// One sample goes through the network at a time, forward and backward, and everything that it needs stays in the
// second-level cache, half a megabyte a thread: for an image 205 KB that forward keeps for backward, 63 KB to work in,
// and three times 74 KB for weights, the same transposed, and their gradient.
//
//   forward   image or text -> tokens x width -> (LayerNorm -> attention -> LayerNorm -> MLP) twice -> LayerNorm ->
//             mean over tokens -> classifier -> logits                                     (embedding.h, forward.h)
//   backward  the same way back, from kept activations; nothing is computed again                    (backward.h)
//
// Stages work on whole rows (one token, WIDTH columns), a tile of some rows at a time (tiles.h). Bias, dropout and
// LayerNorm happen in registers at the end of the matrix product before them, so that memory sees only what is kept.
//
// Terms: T tokens of a sample, WIDTH of a token, HEADS x HEAD_WIDTH, MLP_WIDTH, CLASSES. Rows are tokens.
#pragma once
#include <cmath>
#include <cstring>

#include "vectors.h"

namespace fused {

constexpr int WIDTH = 32;
constexpr int HEADS = 2;
constexpr int HEAD_WIDTH = 16;
constexpr int MLP_WIDTH = 64;
constexpr int BLOCKS = 2;
constexpr int DROPOUT_SITES = 1 + 2 * BLOCKS;  // embedding; attention and MLP of each block
// Columns in a row of queries, keys and values.
constexpr int QUERIES = 0, KEYS = WIDTH, VALUES = 2 * WIDTH, QKV = 3 * WIDTH;
constexpr int MAX_CLASSES = 16;
static_assert(WIDTH == HEADS * HEAD_WIDTH && HEAD_WIDTH % LANES == 0);

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;
constexpr float ATTENTION_SCALE = 0.25f;  // 1 / sqrt(HEAD_WIDTH)

// MNIST: 28 x 28 bytes, cut to 49 patches of 4 x 4. The embedding is trained.
struct Images {
  static constexpr int MAX_TOKENS = 49;
  static constexpr int CLASSES = 10;
  static constexpr bool FIXED_LENGTH = true;
  static constexpr bool TRAINED_EMBEDDING = true;
  static constexpr int SIDE = 28, PATCH = 4, PATCH_PIXELS = PATCH * PATCH, PADDING = 2, PADDED = SIDE + 2 * PADDING;

  struct Sample {
    const uint8_t* image;           // [SIDE][SIDE]
    int row_offset, column_offset;  // of the window in the padded image, 0 to 2 * PADDING
  };
  struct Embedding {
    alignas(ALIGNMENT) float patch[WIDTH][PATCH_PIXELS];
    float patch_bias[WIDTH];
  };
  struct ForwardEmbedding {
    alignas(ALIGNMENT) float patch[PATCH_PIXELS][WIDTH];
    float offset[MAX_TOKENS][WIDTH];  // bias + position
  };
  struct Input {
    alignas(ALIGNMENT) float patches[MAX_TOKENS][PATCH_PIXELS];  // scaled to [-1, 1]
    uint8_t padded[PADDED][PADDED];                              // the border stays 0
  };
};

// AG News: 1 to MAX_TOKENS word vectors, which are not trained. Work is proportional to a text's own tokens.
template <int CAPACITY>
struct Texts {
  static constexpr int MAX_TOKENS = CAPACITY;
  static constexpr int CLASSES = 4;
  static constexpr bool FIXED_LENGTH = false;
  static constexpr bool TRAINED_EMBEDDING = false;

  struct Sample {
    const int32_t* words;    // [tokens], rows of
    const float* vectors;    // [V][WIDTH]
    const float* positions;  // [MAX_TOKENS][WIDTH]
  };
  struct Embedding {};
  struct ForwardEmbedding {};
  struct Input {};
};

// The numbers of one run in the order of generators.architecture.tensor_table and in nn.Linear's layout, [out][in].
// The same struct holds weights and gradients. Backward multiplies by these matrices as they are.
template <class Task>
struct Parameters : Task::Embedding {
  struct Block {
    alignas(ALIGNMENT) float qkv[QKV][WIDTH];  // queries, keys, values
    float out[WIDTH][WIDTH];
    float fc1[MLP_WIDTH][WIDTH];
    float fc1_bias[MLP_WIDTH];
    float fc2[WIDTH][MLP_WIDTH];
    float fc2_bias[WIDTH];
  };
  Block blocks[BLOCKS];
  float fc1[WIDTH][WIDTH];
  float fc1_bias[WIDTH];
  float fc2[Task::CLASSES][WIDTH];
  float fc2_bias[Task::CLASSES];

  static constexpr int COUNT = sizeof(typename Task::Embedding) / sizeof(float) +  // 0 if it is empty
                               BLOCKS * sizeof(Block) / sizeof(float) + WIDTH * WIDTH + WIDTH + Task::CLASSES * WIDTH +
                               Task::CLASSES;

  void read(const float* flat) { std::memcpy(static_cast<void*>(this), flat, COUNT * sizeof(float)); }
  void write(float* flat) const { std::memcpy(flat, static_cast<const void*>(this), COUNT * sizeof(float)); }
  void clear() { std::memset(static_cast<void*>(this), 0, sizeof(*this)); }
};

static_assert(Parameters<Images>::COUNT == 18506 && Parameters<Texts<64>>::COUNT == 17764);

// The same weights as forward multiplies by them: [in][out]. Queries carry log2(e) / sqrt(HEAD_WIDTH), so that
// softmax is a power of 2.
template <class Task>
struct ForwardWeights : Task::ForwardEmbedding {
  struct Block {
    alignas(ALIGNMENT) float qkv[WIDTH][QKV];
    float out[WIDTH][WIDTH];
    float fc1[WIDTH][MLP_WIDTH];
    float fc1_bias[MLP_WIDTH];
    float fc2[MLP_WIDTH][WIDTH];
    float fc2_bias[WIDTH];
  };
  Block blocks[BLOCKS];
  float fc1[WIDTH][WIDTH];
  float fc1_bias[WIDTH];
  float fc2[WIDTH][MAX_CLASSES];  // columns past CLASSES are 0
  float fc2_bias[MAX_CLASSES];

  void prepare(const Parameters<Task>& weights, const float* positions);  // positions [T][WIDTH]
};

// What one sample keeps from forward for backward, and room to work in. Tiles and vectors reach past the sample's
// tokens (up to T_PADDED), and what stands there is left over from other samples: no token's numbers depend on it.
template <class Task>
struct Activations {
  static constexpr int T = Task::MAX_TOKENS;
  static constexpr int T_PADDED = (T + WIDTH - 1) / WIDTH * WIDTH;

  struct Normalised {  // output of a LayerNorm, and its rstd: 1 / standard deviation of its input
    alignas(ALIGNMENT) float rows[T][WIDTH];
    float rstd[T];
  };
  struct Block {
    Normalised attention_input;
    alignas(ALIGNMENT) float qkv[T_PADDED][QKV];
    float attention[HEADS][T][T_PADDED];  // [key][query]
    float heads[T][WIDTH];
    Normalised mlp_input;
    alignas(ALIGNMENT) float hidden[T][MLP_WIDTH];  // after ReLU
  };

  typename Task::Input input;
  alignas(ALIGNMENT) float dropout[DROPOUT_SITES][T][WIDTH];  // 0, or 1 / (1 - rate)
  Block blocks[BLOCKS];
  Normalised output;
  alignas(ALIGNMENT) float pooled[WIDTH];
  float classifier_hidden[WIDTH];
  float logits[MAX_CLASSES];

  // room to work in
  float transposed[HEAD_WIDTH][T_PADDED];  // queries of a head (forward), gradient of a head (backward)
  float by_query[T_PADDED];                // largest score (forward), mean of the score's gradient (backward)
  float logit_gradient[MAX_CLASSES];
  float gradient[T][WIDTH];  // of what is before the dropout behind
  float hidden_gradient[T][MLP_WIDTH];
  float heads_gradient[T_PADDED][WIDTH];
  float score_gradient[T][T_PADDED];  // [key][query]
  float qkv_gradient[T][QKV];

  int length;  // tokens of this sample
  FUSED_INLINE int tokens() const {
    if constexpr (Task::FIXED_LENGTH) return T;
    return length;
  }
};

// Everything that one thread needs for one run at a time.
template <class Task>
struct Workspace {
  Parameters<Task> weights;
  ForwardWeights<Task> forward_weights;
  Parameters<Task> gradient;
  Activations<Task> activations;
};

}  // namespace fused
