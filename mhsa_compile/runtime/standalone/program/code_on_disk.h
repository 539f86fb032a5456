// Code as a file, for machines without /proc, where what has no name has no path either.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <string>

#include "errors.h"
#include "files.h"

namespace mhsa {

// In a folder of this process's alone; both are gone with this object. Throws Error.
class CodeOnDisk {
 public:
  CodeOnDisk(const std::string& place, const std::string& name, const std::string& bytes) : folder_(place + "/mhsa-XXXXXX") {
    if (!mkdtemp(&folder_[0])) throw Error("folder " + in_quotes(place), "room for code", strerror(errno), kHint);
    path = folder_ + "/" + name;
    const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (*file >= 0 && write_all(*file, bytes.data(), bytes.size())) return;
    const std::string reason = strerror(errno);
    remove();
    throw Error("folder " + in_quotes(place), "room for code", reason, kHint);
  }
  CodeOnDisk(const CodeOnDisk&) = delete;
  ~CodeOnDisk() { remove(); }

  std::string path;
  static constexpr const char* kHint = "Mount /proc, or point TMPDIR to a folder that is not mounted noexec.";

 private:
  void remove() const {
    unlink(path.c_str());
    rmdir(folder_.c_str());
  }

  std::string folder_;
};

}  // namespace mhsa
