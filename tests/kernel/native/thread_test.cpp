// Many callers at once, on one weight and on several, from inside tasks too, while the pool is
// resized: results are those of a single caller. Made for ThreadSanitizer.

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "matrix.h"
#include "op/linear.h"
#include "pool/pool.h"
#include "report.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::FormatId;
using fxsparse::LinearCall;

// A weight, a product with it, and what that must be.
struct Job {
  Blob blob;
  Dense dense;
  Tested tested;
  Matrix x;
  Matrix bias;
  bool transposed;
  Matrix expected;

  Matrix run(int threads) const {
    const int64_t out = transposed ? blob.packed.view.cols : blob.packed.view.rows;
    Matrix y = make_matrix(*x.type, x.rows, out, 0);
    LinearCall call{};
    call.packed = &blob.packed;
    call.x = x.memory.data();
    call.x_stride = x.stride;
    call.batch = x.rows;
    call.bias = bias.memory.data();
    call.y = y.memory.data();
    call.y_stride = y.stride;
    call.isa = tested.isa;
    call.threads = threads;
    if (transposed)
      linear_transposed(*tested.kernel, call);
    else
      linear(*tested.kernel, call);
    return y;
  }
};

// One for each kernel, product and kind of batch.
std::vector<Job> make_jobs() {
  std::vector<Job> jobs;
  Random random(1);
  const Type& type = kTypes[0];
  Case c{"", 1, {200, 300}, 1};
  const Weight weight = make_weight(c, type);
  for (int i = 0; i < fxsparse::kKernelLines; ++i) {
    const fxsparse::KernelLine& line = fxsparse::kernel_lines()[i];
    if (!line.usable) continue;
    for (bool transposed : {false, true})
      for (int64_t batch : {1, 5, 40}) {
        const int64_t in = transposed ? c.shape.rows : c.shape.cols;
        Dense dense = to_dense(weight, Order::kRows, false);
        Blob blob = pack(*fxsparse::find_format(line.format), dense);
        // NaN in a row: what corrects it runs on all threads, too.
        Matrix x = random_matrix(type, batch, in, 0, random);
        if (batch == 5) store(type, HUGE_VAL, x.row(2), in / 2);
        Job job{std::move(blob),
                std::move(dense),
                {line.isa, line.isa_name, &line.kernels[0]},
                std::move(x),
                random_matrix(type, 1, c.shape.rows, 0, random),
                transposed,
                {}};
        job.expected = job.run(1);
        jobs.push_back(std::move(job));
      }
  }
  return jobs;
}

bool packs_alike(const Job& job) {
  const fxsparse::Header& header = job.blob.packed.header;
  const Memory again(job.blob.memory.bytes());
  fxsparse::pack(job.dense.view, header, again.data(), again.bytes());
  job.blob.packed.format->validate(job.blob.packed.view);
  const Memory out(job.dense.memory.bytes());
  unpack(job.blob.packed, out.data(), job.dense.view.row_stride, job.dense.view.col_stride);
  return again == job.blob.memory && out == job.dense.memory;
}

}  // namespace

void test_threads(double seconds) {
  const Scope scope("threads");
  fxsparse::set_num_threads(4);
  const std::vector<Job> jobs = make_jobs();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const auto running = [&] { return std::chrono::steady_clock::now() < end; };
  std::atomic<int> wrong{0};
  std::atomic<int64_t> calls{0};
  const auto check = [&](bool right) {
    wrong += !right;
    ++calls;
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      Random random(caller);
      while (running()) {
        // Half of the callers share one weight.
        const Job& job = jobs[caller % 2 ? below(random, jobs.size()) : 0];
        switch (below(random, 8)) {
          case 0:
            check(packs_alike(job));
            break;
          case 1:
            // From inside a task: the pool is busy.
            fxsparse::parallel_for(3, 6,
                                   [&](int) { check(job.run(3).memory == job.expected.memory); });
            break;
          default:
            check(job.run(static_cast<int>(below(random, 5))).memory == job.expected.memory);
        }
      }
    });
  callers.emplace_back([&] {
    for (int threads = 1; running(); threads = threads % 6 + 1) {
      fxsparse::set_num_threads(threads);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  });
  for (std::thread& caller : callers) caller.join();
  expect(wrong == 0, "%d of %lld calls gave other bits", wrong.load(),
         static_cast<long long>(calls.load()));
  expect(calls > 0, "no call was made");
}

}  // namespace native
