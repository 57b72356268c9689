// Checks of the tensor views that functions are given. A failed check is a ValueError that names the argument, what it is and what
// is expected; nothing is read or written before every check has passed.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

namespace te {

using tvm::ffi::TensorView;

enum class DType { f32, bf16, f16, u8, i32, i64, f8, other };

inline DType dtype_of(const TensorView& t) {
  const DLDataType d = t.dtype();
  if (d.lanes != 1) return DType::other;
  if (d.code == kDLFloat && d.bits == 32) return DType::f32;
  if (d.code == kDLFloat && d.bits == 16) return DType::f16;
  if (d.code == kDLBfloat && d.bits == 16) return DType::bf16;
  if (d.code == kDLUInt && d.bits == 8) return DType::u8;
  if (d.code == kDLInt && d.bits == 32) return DType::i32;
  if (d.code == kDLInt && d.bits == 64) return DType::i64;
  if (d.code >= kDLFloat8_e3m4 && d.code <= kDLFloat8_e8m0fnu && d.bits == 8) return DType::f8;
  return DType::other;
}

inline const char* dtype_name(DType d) {
  switch (d) {
    case DType::f32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::f16: return "float16";
    case DType::u8: return "uint8";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::f8: return "float8";
    default: return "another dtype";
  }
}

// "bfloat16[3, 128]", for messages.
inline std::string describe(const TensorView& t) {
  std::ostringstream out;
  const DType d = dtype_of(t);
  if (d == DType::other) {
    out << "dtype(code " << int(t.dtype().code) << ", " << int(t.dtype().bits) << " bits)";
  } else {
    out << dtype_name(d);
  }
  out << "[";
  for (int i = 0; i < t.ndim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "]";
  return out.str();
}

#define TE_CHECK(condition, message)                                \
  do {                                                              \
    if (!(condition)) TVM_FFI_THROW(ValueError) << message;         \
  } while (0)

inline void check_device(const TensorView& t, const char* name, DLDeviceType device) {
  TE_CHECK(t.device().device_type == device || (device == kDLCPU && t.device().device_type == kDLCUDAHost),
           name << " is on device type " << int(t.device().device_type) << "; expected device type " << int(device)
                << (device == kDLCPU ? " (CPU)" : ""));
}

inline void check_rank(const TensorView& t, const char* name, int rank, const char* shape_text) {
  TE_CHECK(t.ndim() == rank, name << " is " << describe(t) << "; expected " << rank << " dimensions " << shape_text);
}

// `expected` is spelled in messages, for example "out is float32[3, 4]; expected shape [3, 5] (the shape of x)".
inline void check_shape(const TensorView& t, const char* name, std::initializer_list<int64_t> expected, const char* why) {
  bool same = t.ndim() == int(expected.size());
  int i = 0;
  for (int64_t n : expected) {
    if (!same) break;
    same = t.size(i++) == n;
  }
  if (same) return;
  std::ostringstream text;
  i = 0;
  for (int64_t n : expected) text << (i++ ? ", " : "") << n;
  TVM_FFI_THROW(ValueError) << name << " is " << describe(t) << "; expected shape [" << text.str() << "] (" << why << ")";
}

inline void check_dtype(const TensorView& t, const char* name, std::initializer_list<DType> allowed) {
  for (DType d : allowed) {
    if (dtype_of(t) == d) return;
  }
  std::ostringstream text;
  int i = 0;
  for (DType d : allowed) text << (i++ ? " or " : "") << dtype_name(d);
  TVM_FFI_THROW(ValueError) << name << " is " << describe(t) << "; expected dtype " << text.str();
}

// Row-major without gaps. Strides of dimensions of size 0 or 1 mean nothing and are not looked at.
inline void check_contiguous(const TensorView& t, const char* name) {
  if (t.numel() == 0) return;
  int64_t expected = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    TE_CHECK(t.size(i) == 1 || t.stride(i) == expected, name << " is " << describe(t) << " with stride " << t.stride(i)
                                                             << " in dimension " << i << "; expected a contiguous tensor");
    expected *= t.size(i);
  }
}

// Innermost dimension without gaps, other strides free (zero and negative included).
inline void check_inner_contiguous(const TensorView& t, const char* name) {
  if (t.numel() == 0 || t.ndim() == 0) return;
  const int last = t.ndim() - 1;
  TE_CHECK(t.size(last) == 1 || t.stride(last) == 1, name << " is " << describe(t) << " with stride " << t.stride(last)
                                                          << " in its last dimension; expected stride 1 there");
}

template <typename T>
T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

}  // namespace te
