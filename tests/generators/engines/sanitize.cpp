// The fused engine at its borders, for a build with sanitizers (sanitize.py): every crop, every length of a text, more
// threads than runs, workspaces full of NaN. All data lies in heap blocks of exactly its size.
#include <cstdio>
#include <cstdlib>

#include "engine.cpp"

namespace {

using fused::Engine;
using fused::Task;
using Network = fused::Parameters<Task>;
constexpr bool IMAGES = std::is_same_v<Task, fused::Images>;
constexpr int64_t RUNS = 3;
constexpr int64_t TOKENS = IMAGES ? Task::MAX_TOKENS : Task::MAX_TOKENS - 3;
constexpr int64_t BATCH = IMAGES ? 25 : TOKENS;
constexpr int64_t SAMPLES = fused::EVALUATION_ITEM + 20;
constexpr int64_t WORDS = 11;

uint32_t random_state = 1;
uint32_t random_below(uint32_t bound) {
  random_state = random_state * 1664525u + 1013904223u;
  return (random_state >> 8) % bound;
}
float random_number() { return int(random_below(2001)) / 1000.0f - 1; }

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

struct Data {
  std::vector<uint8_t> images;
  std::vector<int32_t> words;
  std::vector<int64_t> labels, lengths, indices, crops;
  std::vector<float> vectors, positions;
  fused::Split split{};
  fused::Batch batch{};

  Data() {
    for (int64_t i = 0; i < SAMPLES; i++) {
      labels.push_back(random_below(Task::CLASSES));
      lengths.push_back(1 + i % TOKENS);
    }
    for (int64_t i = 0; i < TOKENS * fused::WIDTH; i++) positions.push_back(random_number());
    for (int64_t i = 0; i < BATCH; i++) indices.push_back(SAMPLES - 1 - i);
    split = {nullptr, labels.data(), nullptr, SAMPLES, TOKENS};
    batch = {indices.data(), nullptr, BATCH, 0xFEDCBA9876543210, 6554};  // a rate of 0.1
    if (IMAGES) {
      for (int64_t i = 0; i < SAMPLES * 28 * 28; i++) images.push_back(random_below(256));
      for (int64_t i = 0; i < BATCH; i++) crops.insert(crops.end(), {i / 5, i % 5});
      split.inputs = images.data();
      batch.crops = crops.data();
    } else {
      for (int64_t i = 0; i < SAMPLES * TOKENS; i++) words.push_back(random_below(WORDS));
      for (int64_t i = 0; i < WORDS * fused::WIDTH; i++) vectors.push_back(random_number());
      split.inputs = words.data();
      split.lengths = lengths.data();
    }
  }
};

struct Results {
  std::vector<float> loss = std::vector<float>(RUNS), gradient = std::vector<float>(RUNS * Network::COUNT);
  std::vector<int64_t> correct = std::vector<int64_t>(RUNS);
  std::vector<float> logits = std::vector<float>(SAMPLES * Task::CLASSES);  // of run 0, as what follows
  double test_loss;
  int64_t test_correct;

  bool operator==(const Results& other) const {
    return loss == other.loss && gradient == other.gradient && logits == other.logits && correct == other.correct &&
           test_loss == other.test_loss && test_correct == other.test_correct;
  }
};

Results compute(Engine* engine, const Data& data, const std::vector<float>& weights) {
  Results r;
  fused_train_step(engine, &data.split, &data.batch, RUNS, weights.data(), r.loss.data(), r.correct.data(),
                   r.gradient.data());
  fused_logits(engine, &data.split, 1, weights.data(), r.logits.data());
  fused_evaluate(engine, &data.split, 1, weights.data(), &r.test_loss, &r.test_correct);
  return r;
}

// Whatever a sample left behind must not matter. (The border around an image, in `input`, is set once, to 0.)
void poison(Engine* engine) {
  for (auto& workspace : engine->workspaces) {
    char* first = reinterpret_cast<char*>(&workspace->activations.dropout);
    char* end = reinterpret_cast<char*>(&workspace->activations + 1);
    std::memset(first, 0xFF, end - first);
  }
}

Engine* create(int threads, const Data& data) {
  return fused_create(threads, TOKENS, data.positions.data(), IMAGES ? nullptr : data.vectors.data());
}

// The loss along the gradient of run 0 rises as the gradient says.
void check_slope(Engine* engine, const Data& data, const std::vector<float>& weights, const Results& at) {
  constexpr double STEP = 1e-3;
  double norm = 0;
  for (int64_t i = 0; i < Network::COUNT; i++) norm += double(at.gradient[i]) * at.gradient[i];
  norm = std::sqrt(norm);
  double losses[2];
  for (int side : {0, 1}) {
    std::vector<float> moved = weights;
    const double step = (side ? STEP : -STEP) / norm;
    for (int64_t i = 0; i < Network::COUNT; i++) moved[i] += step * at.gradient[i];
    losses[side] = compute(engine, data, moved).loss[0];
  }
  const double slope = (losses[1] - losses[0]) / (2 * STEP);
  check(std::abs(slope - norm) < 0.01 * norm, "finite difference");
}

}  // namespace

int main() {
  const Data data;
  std::vector<float> weights(RUNS * Network::COUNT);
  for (float& w : weights) w = 0.3f * random_number();

  Engine* one = create(1, data);
  const Results expected = compute(one, data, weights);
  for (float loss : expected.loss) check(std::isfinite(loss), "finite loss");
  check_slope(one, data, weights, expected);
  poison(one);
  check(compute(one, data, weights) == expected, "independence of what the workspace held");
  for (int threads : {2, 3, 5}) {
    Engine* several = create(threads, data);
    check(compute(several, data, weights) == expected, "independence of threads");
    fused_destroy(several);
  }

  std::fill_n(weights.data() + Network::COUNT, Network::COUNT, NAN);
  const Results damaged = compute(one, data, weights);
  check(std::isnan(damaged.loss[1]), "loss NaN of a run that is not finite");
  for (int run : {0, 2}) check(damaged.loss[run] == expected.loss[run], "independence of neighbours");
  fused_destroy(one);
  std::printf("ok: %d lanes, up to %d tokens, loss %.5f\n", fused::LANES, int(TOKENS), expected.loss[0]);
}
