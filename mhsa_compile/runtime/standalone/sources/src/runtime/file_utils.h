// TVM keeps executables in files of their own, too. Here they come in the compiled module, and files are refused.
#pragma once
#include <tvm/ffi/error.h>

#include <string>

namespace tvm::runtime {

inline void LoadBinaryFromFile(const std::string& name, std::string*) {
  TVM_FFI_THROW(RuntimeError) << name << ": files of executables are not in this runtime";
}
inline void SaveBinaryToFile(const std::string& name, const std::string&) {
  TVM_FFI_THROW(RuntimeError) << name << ": files of executables are not in this runtime";
}

}  // namespace tvm::runtime
