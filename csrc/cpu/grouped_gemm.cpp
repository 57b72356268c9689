// Grouped GEMM: consecutive groups of rows, each with a matrix of its own. FP32 accumulation.
//
// Group g holds rows offset[g] .. offset[g + 1] - 1, offset being the running sum of group_sizes. Rows past the last group belong to
// none: never read, and 0 in y.
#include <cstring>
#include <memory>
#include <vector>

#include "export.h"
#include "gemm_kernels.h"
#include "parallel.h"
#include "rows.h"
#include "tensor.h"

namespace te {
namespace {

int64_t size_at(const TensorView& sizes, int64_t g) {
  return dtype_of(sizes) == DType::i32 ? int64_t(data<int32_t>(sizes)[g]) : data<int64_t>(sizes)[g];
}

// Running sums of the group sizes, checked against the rows that there are.
std::vector<int64_t> offsets_of(const TensorView& sizes, int64_t groups, int64_t rows, const char* rows_of) {
  check_device(sizes, "group_sizes", kDLCPU);
  check_dtype(sizes, "group_sizes", {DType::i32, DType::i64});
  check_shape(sizes, "group_sizes", {groups}, "one size per group");
  check_contiguous(sizes, "group_sizes");
  std::vector<int64_t> offsets(groups + 1, 0);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t n = size_at(sizes, g);
    TE_CHECK(n >= 0, "group_sizes[" << g << "] is " << n << "; expected 0 or more");
    TE_CHECK(n <= rows - offsets[g], "group_sizes sum to more than the " << rows << " rows of " << rows_of << ": groups 0 to " << g
                                                                         << " hold " << offsets[g] << " + " << n << " rows");
    offsets[g + 1] = offsets[g] + n;
  }
  return offsets;
}

char* at(const TensorView& t, int64_t element) { return data<char>(t) + element * float_size(t); }

struct Task {
  int64_t group, row, rows, col, cols;
};

void add_tasks(std::vector<Task>& tasks, int64_t group, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; r += kGemmTile) {
    for (int64_t c = 0; c < cols; c += kGemmTile) {
      tasks.push_back({group, r, rows - r < kGemmTile ? rows - r : kGemmTile, c, cols - c < kGemmTile ? cols - c : kGemmTile});
    }
  }
}

template <typename F>
void run_tiles(const std::vector<Task>& tasks, const F& tile_of) {
  parallel_for(int64_t(tasks.size()), [&](int64_t i) {
    // A worker keeps its scratch: the pages are touched once, not at every call.
    static thread_local std::unique_ptr<float[]> scratch;
    if (!scratch) scratch.reset(new float[kGemmScratch]);
    TE_SIMD_CALL(gemm_tile)(tile_of(tasks[i]), scratch.get());
  });
}

}  // namespace

// a[M, K], b[E, N, K], group_sizes[E] -> y[M, N] (dtype of a, or float32): y_g = a_g b_g^T
void grouped_gemm(TensorView a, TensorView b, TensorView group_sizes, TensorView y) {
  check_rows(a, "a", 2, "[M, K]");
  check_dtype_of(b, "b", a, "a");
  check_rank(b, "b", 3, "[E, N, K]");
  const int64_t m = a.size(0), k = a.size(1), groups = b.size(0), n = b.size(1);
  check_shape(b, "b", {groups, n, k}, "[E, N, K] with the K of a");
  check_contiguous(b, "b");
  check_rows(y, "y", 2, "[M, N]");
  TE_CHECK(dtype_of(y) == dtype_of(a) || dtype_of(y) == DType::f32,
           "y is " << describe(y) << "; expected dtype " << dtype_name(dtype_of(a)) << " (that of a) or float32");
  check_shape(y, "y", {m, n}, "the rows of a by the N of b");
  const std::vector<int64_t> offset = offsets_of(group_sizes, groups, m, "a");

  std::vector<Task> tasks;
  for (int64_t g = 0; g < groups; ++g) add_tasks(tasks, g, offset[g + 1] - offset[g], n);
  run_tiles(tasks, [&](const Task& t) {
    const int64_t row = offset[t.group] + t.row;
    return GemmTile{{at(a, row * k), row_dtype(a), k, 1},
                    {at(b, (t.group * n + t.col) * k), row_dtype(b), k, 1},
                    t.rows, t.cols, k, at(y, row * n + t.col), row_dtype(y), n, false};
  });
  const int64_t used = offset[groups];
  if (used < m && n > 0) memset(at(y, used * n), 0, (m - used) * n * float_size(y));
}

// dy[M, N], x[M, K], group_sizes[E] -> dw[E, N, K] f32 (+)= dy_g^T x_g. An empty group gives exactly 0, or leaves dw as it is.
void grouped_gemm_wgrad(TensorView dy, TensorView x, TensorView group_sizes, TensorView dw, int64_t accumulate) {
  check_rows(dy, "dy", 2, "[M, N]");
  check_dtype_of(x, "x", dy, "dy");
  check_rank(x, "x", 2, "[M, K]");
  const int64_t m = dy.size(0), n = dy.size(1), k = x.size(1);
  check_shape(x, "x", {m, k}, "the rows of dy");
  check_contiguous(x, "x");
  check_rank(dw, "dw", 3, "[E, N, K]");
  const int64_t groups = dw.size(0);
  check_f32(dw, "dw", {groups, n, k}, "[E, N, K] with the N of dy and the K of x");
  TE_CHECK(accumulate == 0 || accumulate == 1, "accumulate is " << accumulate << "; expected 0 or 1");
  const std::vector<int64_t> offset = offsets_of(group_sizes, groups, m, "dy");

  std::vector<Task> tasks;
  for (int64_t g = 0; g < groups; ++g) add_tasks(tasks, g, n, k);
  run_tiles(tasks, [&](const Task& t) {
    const int64_t first = offset[t.group];
    return GemmTile{{at(dy, first * n + t.row), row_dtype(dy), 1, n},
                    {at(x, first * k + t.col), row_dtype(x), 1, k},
                    t.rows, t.cols, offset[t.group + 1] - first,
                    data<float>(dw) + (t.group * n + t.row) * k + t.col, kRowF32, k, accumulate == 1};
  });
}

TE_EXPORT(grouped_gemm);
TE_EXPORT(grouped_gemm_wgrad);

}  // namespace te
