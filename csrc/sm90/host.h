// Host side shared by every kernel: argument checks (ValueError before any launch), dtypes, stream, device facts.
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "context.h"
#include "numeric.cuh"

namespace te {

namespace ffi = tvm::ffi;
using ffi::Optional;
using ffi::TensorView;

#define TE_CHECK(condition, message) \
  do {                               \
    if (!(condition)) TVM_FFI_THROW(ValueError) << message; \
  } while (0)

// After a launch: reports a launch that the driver refused, as RuntimeError.
#define TE_LAUNCHED(what)                                                                        \
  do {                                                                                           \
    const cudaError_t status_ = cudaGetLastError();                                              \
    if (status_ != cudaSuccess)                                                                  \
      TVM_FFI_THROW(RuntimeError) << what << " did not launch: " << cudaGetErrorString(status_); \
  } while (0)

enum class Type { bf16, fp16, fp32 };

inline bool is_dtype(const TensorView& t, int code, int bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}
inline bool is_f32(const TensorView& t) { return is_dtype(t, kDLFloat, 32); }
inline bool is_bf16(const TensorView& t) { return is_dtype(t, kDLBfloat, 16); }

inline Type float_type(const TensorView& t, const char* name) {
  if (is_bf16(t)) return Type::bf16;
  if (is_dtype(t, kDLFloat, 16)) return Type::fp16;
  TE_CHECK(is_f32(t), name << " must be bfloat16, float16 or float32");
  return Type::fp32;
}

inline std::string shape_text(const TensorView& t) {
  std::string s = "[";
  for (int i = 0; i < t.ndim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

// Rank, shape (-1: any) and the device of `first`. Throws naming the tensor.
inline void check_shape(const TensorView& t, const char* name, std::initializer_list<int64_t> shape) {
  bool ok = t.ndim() == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t want : shape) {
    if (ok && want >= 0 && t.size(i) != want) ok = false;
    ++i;
  }
  if (!ok) {
    std::string want = "[";
    i = 0;
    for (int64_t w : shape) want += (i++ ? ", " : "") + (w < 0 ? std::string("any") : std::to_string(w));
    TVM_FFI_THROW(ValueError) << name << " must have shape " << want << "], got " << shape_text(t);
  }
}

// Contiguous, ignoring the strides of dimensions of size one (frameworks leave them arbitrary).
inline bool contiguous(const TensorView& t) {
  int64_t expect = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != expect) return t.numel() == 0;
    expect *= t.size(i);
  }
  return true;
}
inline void check_contiguous(const TensorView& t, const char* name) {
  TE_CHECK(contiguous(t), name << " must be contiguous");
}
inline void check_f32(const TensorView& t, const char* name) {
  TE_CHECK(is_f32(t), name << " must be float32");
  check_contiguous(t, name);
}
inline void check_i32(const TensorView& t, const char* name) {
  TE_CHECK(is_dtype(t, kDLInt, 32), name << " must be int32");
  check_contiguous(t, name);
}
inline void check_same_device(const TensorView& t, const TensorView& first, const char* name) {
  TE_CHECK(t.device().device_type == first.device().device_type && t.device().device_id == first.device().device_id,
           name << " lies on another device than the first tensor; move it there");
}

// Scales of 1x128 blocks [lines, blocks]: line after line (false), or block after block (true), so that those of neighbouring lines touch.
inline bool by_block(const TensorView& t, const char* name) {
  if (contiguous(t)) return false;
  TE_CHECK(t.ndim() == 2 && t.stride(0) == 1 && t.stride(1) == t.size(0), name << " must be contiguous, or the transpose of a contiguous tensor");
  return true;
}

// Stride between rows of a [R, C] tensor whose rows may be apart, but whose columns touch.
inline int64_t row_stride(const TensorView& t, const char* name) {
  TE_CHECK(t.ndim() == 2, name << " must have two dimensions, got " << shape_text(t));
  if (t.size(0) == 0) return t.size(1);  // strides of an empty tensor mean nothing
  TE_CHECK(t.size(1) <= 1 || t.stride(1) == 1, name << " must have innermost stride 1");
  if (t.size(0) == 1) return t.size(1);
  TE_CHECK(t.stride(0) >= t.size(1), name << " has overlapping rows (row stride " << t.stride(0) << ")");
  return t.stride(0);
}

template <typename P>
inline P* pointer(const TensorView& t) {
  return reinterpret_cast<P*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

// FP8 storage: uint8, or the float8 dtype of the format that the call names.
inline void check_fp8(const TensorView& t, const char* name, int64_t format) {
  TE_CHECK(format == kE4M3 || format == kE5M2,
           "format " << format << " is not available on sm90 (0 = e4m3, 1 = e5m2); FNUZ formats are AMD gfx942's");
  const int code = t.dtype().code;
  const bool bytes = t.dtype().bits == 8 && (code == kDLUInt || code == (format == kE4M3 ? kDLFloat8_e4m3fn : kDLFloat8_e5m2));
  TE_CHECK(bytes, name << " must be uint8 or " << (format == kE4M3 ? "float8_e4m3fn" : "float8_e5m2"));
  check_contiguous(t, name);
}

struct DeviceFacts {
  int sms = 0;
  int major = 0, minor = 0;
};

inline const DeviceFacts& device_facts(int device) {
  static DeviceFacts facts[64];
  DeviceFacts& f = facts[device & 63];
  if (f.sms == 0) {
    DeviceFacts read;
    cudaDeviceGetAttribute(&read.major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&read.minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&read.sms, cudaDevAttrMultiProcessorCount, device);
    f = read;
  }
  return f;
}

// Every entry point opens one: checks the device, makes it current, and holds the caller's stream.
class Launch : public Context {
 public:
  explicit Launch(const TensorView& t) : id_(check(t)), guard_(id_) {
    stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, id_));
    const DeviceFacts& f = device_facts(id_);
    TE_CHECK(f.major == 9 && f.minor == 0,
             "the sm90 library runs on compute capability 9.0 only; this device has " << f.major << "." << f.minor);
    sms = f.sms;
  }
  int device() const { return id_; }

 private:
  static int check(const TensorView& t) {
    TE_CHECK(t.device().device_type == kDLCUDA, "the first tensor must be on a CUDA device");
    return t.device().device_id;
  }
  int id_;
  ffi::CUDADeviceGuard guard_;
};

// Ops that keep a whole row in the registers of one block.
inline void check_row_width(int64_t C) {
  TE_CHECK(C > 0 && C <= 16384, "row width " << C << " is not supported (1 to 16384): a block holds a row in registers");
}

// Calls f with a value of the element type: with_type(Type::bf16, [&](auto tag) { using T = decltype(tag); ... }).
template <typename F>
inline void with_type(Type type, F&& f) {
  if (type == Type::bf16) f(bf16{});
  else if (type == Type::fp16) f(__half{});
  else f(float{});
}

}  // namespace te
