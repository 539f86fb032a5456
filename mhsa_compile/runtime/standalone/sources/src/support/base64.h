// TVM writes tensors into JSON in base 64. Nobody does that beside a compiled module, so here it is refused.
#pragma once
#include <tvm/ffi/error.h>
#include <tvm/support/io.h>

namespace tvm::support {

class NoBase64 : public Stream {
 public:
  explicit NoBase64(Stream*) { TVM_FFI_THROW(RuntimeError) << "tensors in JSON: not in this runtime"; }
  size_t Read(void*, size_t) final { return 0; }
  size_t Write(const void*, size_t) final { return 0; }
  size_t Left() const final { return 0; }
  void InitPosition() {}
  void Finish() {}
};
using Base64InStream = NoBase64;
using Base64OutStream = NoBase64;

}  // namespace tvm::support
