// Calls of TVM's runtime through its C interface only: it may be built with another C++ library, and an exception of that
// one would not be caught here. Errors come as tvm::ffi::Error.
#pragma once

#include <tvm/ffi/function.h>

#include <utility>
#include <vector>

namespace mhsa {

namespace ffi = tvm::ffi;

inline ffi::Any call_packed(const ffi::Function& function, ffi::AnyView* arguments, size_t count) {
  ffi::Any result;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIFunctionCall(const_cast<ffi::Object*>(static_cast<const ffi::Object*>(function.get())),
                                             reinterpret_cast<TVMFFIAny*>(arguments), static_cast<int32_t>(count),
                                             reinterpret_cast<TVMFFIAny*>(&result)));
  return result;
}

template <typename... Arguments>
ffi::Any call(const ffi::Function& function, Arguments&&... arguments) {
  ffi::AnyView packed[sizeof...(Arguments) + 1];
  ffi::PackedArgs::Fill(packed, std::forward<Arguments>(arguments)...);
  return call_packed(function, packed, sizeof...(Arguments));
}

inline ffi::Any call_all(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
  std::vector<ffi::AnyView> packed(arguments.begin(), arguments.end());
  return call_packed(function, packed.data(), packed.size());
}

inline ffi::Function global(const char* name) { return ffi::Function::GetGlobalRequired(name); }

}  // namespace mhsa
