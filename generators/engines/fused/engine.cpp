// A population's training step and evaluation, and the C interface that Python calls (fused_engine.py).
//
// Work is dealt in items of fixed extent: a run's batch, or EVALUATION_ITEM samples of a split for one run. Each item
// is computed by one thread from start to end, and sums over items are formed in order, so the number of threads and
// the number of runs change no bit. FUSED_TASK names the instance: Images, or Texts<capacity>.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "backward.h"
#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace fused {

using Task = FUSED_TASK;
constexpr int64_t EVALUATION_ITEM = 500;

// Mirrored in Python (ctypes); all arrays contiguous.
struct Split {
  const void* inputs;      // uint8 [N][28][28] or int32 [N][row]
  const int64_t* labels;   // [N]
  const int64_t* lengths;  // [N], or null for images
  int64_t samples;         // N
  int64_t row;             // token ids in a row
};

struct Batch {
  const int64_t* indices;  // [samples]
  const int64_t* crops;    // [samples][2], or null: no shift
  int64_t samples;
  uint64_t dropout_key;
  uint32_t dropout_threshold;  // a unit is dropped where its 16-bit number is below, at most 65535
};

struct Engine {
  const float* positions;                                    // [T][WIDTH]
  const float* word_vectors;                                 // [V][WIDTH], or null
  int64_t max_tokens;                                        // of the task, at most Task::MAX_TOKENS
  std::vector<std::unique_ptr<Workspace<Task>>> workspaces;  // one a thread
};

// Numbers below 1e-38, which small attention weights lead to, take some processors a hundred times as long.
class FlushDenormals {
#ifdef __SSE__
  static constexpr unsigned FLUSH_AND_READ_AS_ZERO = 0x8040;
  const unsigned before_ = _mm_getcsr();

 public:
  FlushDenormals() { _mm_setcsr(before_ | FLUSH_AND_READ_AS_ZERO); }
  ~FlushDenormals() { _mm_setcsr(before_); }
#else
 public:
  FlushDenormals() {}
#endif
};

// Call work(item, workspace) once for each item, on all of the engine's threads.
template <class Work>
void for_items(Engine& engine, int64_t items, Work work) {
  std::atomic<int64_t> next{0};
  const auto take_items = [&](Workspace<Task>& workspace) {
    const FlushDenormals flush;
    for (int64_t item = next++; item < items; item = next++) work(item, workspace);
  };
  std::vector<std::thread> others;
  const size_t threads = std::min<size_t>(engine.workspaces.size(), items);
  for (size_t i = 1; i < threads; i++) others.emplace_back(take_items, std::ref(*engine.workspaces[i]));
  take_items(*engine.workspaces[0]);
  for (std::thread& thread : others) thread.join();
}

Images::Sample find_sample(Images, const Engine&, const Split& split, int64_t index, const int64_t* crop) {
  const auto* image = static_cast<const uint8_t*>(split.inputs) + index * Images::SIDE * Images::SIDE;
  if (!crop) return {image, Images::PADDING, Images::PADDING};
  return {image, int(crop[0]), int(crop[1])};
}

template <int CAPACITY>
typename Texts<CAPACITY>::Sample find_sample(Texts<CAPACITY>, const Engine& engine, const Split& split, int64_t index,
                                             const int64_t*) {
  const auto* words = static_cast<const int32_t*>(split.inputs) + index * split.row;
  return {words, engine.word_vectors, engine.positions};
}

void load_run(const Engine& engine, Workspace<Task>& w, const float* weights, int64_t run) {
  w.weights.read(weights + run * Parameters<Task>::COUNT);
  w.forward_weights.prepare(w.weights, engine.positions);
}

void train_run(const Engine& engine, const Split& split, const Batch& batch, Workspace<Task>& w, float* loss,
               int64_t* correct, float* gradient) {
  const Dropout dropout{uint32_t(batch.dropout_key), uint32_t(batch.dropout_key >> 32), batch.dropout_threshold,
                        float(65536.0 / (65536.0 - batch.dropout_threshold)), uint32_t(engine.max_tokens)};
  Activations<Task>& s = w.activations;
  w.gradient.clear();
  double total = 0;
  *correct = 0;
  for (int64_t b = 0; b < batch.samples; b++) {
    const int64_t index = batch.indices[b];
    s.length = split.lengths ? split.lengths[index] : Task::MAX_TOKENS;
    draw_dropout(s, dropout, b);
    forward<true>(w.forward_weights,
                  find_sample(Task{}, engine, split, index, batch.crops ? batch.crops + 2 * b : nullptr), s);
    const Answer answer = cross_entropy(s, split.labels[index], 1.0f / batch.samples);
    total += answer.loss;
    *correct += answer.correct;
    backward(w.weights, s, w.gradient);
  }
  *loss = total / batch.samples;
  w.gradient.write(gradient);
}

// Forward without dropout over a split, for all runs: done(run, sample, item, activations) after each sample.
template <class Done>
void for_logits(Engine& engine, const Split& split, int64_t runs, const float* weights, int64_t items_a_run,
                Done done) {
  for_items(engine, runs * items_a_run, [&](int64_t item, Workspace<Task>& w) {
    const int64_t run = item / items_a_run, first = item % items_a_run * EVALUATION_ITEM;
    load_run(engine, w, weights, run);
    for (int64_t i = first; i < std::min(first + EVALUATION_ITEM, split.samples); i++) {
      w.activations.length = split.lengths ? split.lengths[i] : Task::MAX_TOKENS;
      forward<false>(w.forward_weights, find_sample(Task{}, engine, split, i, nullptr), w.activations);
      done(run, i, item, w.activations);
    }
  });
}

int64_t items_of(const Split& split) { return (split.samples + EVALUATION_ITEM - 1) / EVALUATION_ITEM; }

}  // namespace fused

extern "C" {

fused::Engine* fused_create(int64_t threads, int64_t max_tokens, const float* positions, const float* word_vectors) {
  auto* engine = new fused::Engine{positions, word_vectors, max_tokens, {}};
  for (int64_t i = 0; i < threads; i++) engine->workspaces.push_back(std::make_unique<fused::Workspace<fused::Task>>());
  return engine;
}

void fused_destroy(fused::Engine* engine) { delete engine; }

// weights [runs][P]; loss [runs], mean over the batch; correct [runs]; gradient [runs][P]
void fused_train_step(fused::Engine* engine, const fused::Split* split, const fused::Batch* batch, int64_t runs,
                      const float* weights, float* loss, int64_t* correct, float* gradient) {
  fused::for_items(*engine, runs, [&](int64_t run, auto& workspace) {
    fused::load_run(*engine, workspace, weights, run);
    fused::train_run(*engine, *split, *batch, workspace, loss + run, correct + run,
                     gradient + run * fused::Parameters<fused::Task>::COUNT);
  });
}

// logits [runs][N][CLASSES]
void fused_logits(fused::Engine* engine, const fused::Split* split, int64_t runs, const float* weights, float* logits) {
  constexpr int CLASSES = fused::Task::CLASSES;
  fused::for_logits(*engine, *split, runs, weights, fused::items_of(*split),
                    [&](int64_t run, int64_t sample, int64_t, const auto& activations) {
                      std::copy_n(activations.logits, CLASSES, logits + (run * split->samples + sample) * CLASSES);
                    });
}

// loss [runs], sum over the split; correct [runs]
void fused_evaluate(fused::Engine* engine, const fused::Split* split, int64_t runs, const float* weights, double* loss,
                    int64_t* correct) {
  const int64_t items = fused::items_of(*split);
  std::vector<double> item_loss(runs * items);
  std::vector<int64_t> item_correct(runs * items);
  fused::for_logits(*engine, *split, runs, weights, items,
                    [&](int64_t, int64_t sample, int64_t item, auto& activations) {
                      const fused::Answer answer = fused::cross_entropy(activations, split->labels[sample], 1.0f);
                      item_loss[item] += answer.loss;
                      item_correct[item] += answer.correct;
                    });
  for (int64_t run = 0; run < runs; run++) {
    loss[run] = 0;
    correct[run] = 0;
    for (int64_t item = run * items; item < (run + 1) * items; item++) {
      loss[run] += item_loss[item];
      correct[run] += item_correct[item];
    }
  }
}
}
