#include "file.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#if !defined(_WIN32)
#include <fcntl.h>
#include <unistd.h>
#endif

namespace kvfuse {
namespace {

[[noreturn]] void FailFile(const std::string& path, const char* wanted) {
  const int error = errno;
  throw FileError("[" + path + "] expected " + wanted + "; found: " + std::strerror(error));
}

// Puts the bytes on the disk, not only into the system's cache: a rename may come to be before them.
void Flush(const std::string& path) {
#if !defined(_WIN32)
  const int file = ::open(path.c_str(), O_RDONLY);
  if (file < 0 || ::fsync(file) != 0) {
    if (file >= 0) ::close(file);
    FailFile(path, "a file that can be flushed");
  }
  ::close(file);
#else
  (void)path;
#endif
}

}  // namespace

std::string ReadFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(std::filesystem::u8path(path), ignored))
    throw FileError("[" + path + "] expected a readable file; found: a folder");
  std::ifstream in(std::filesystem::u8path(path), std::ios::binary | std::ios::ate);
  if (!in) FailFile(path, "a readable file");
  const std::streamoff size = in.tellg();
  if (size < 0) FailFile(path, "a file of known size");
  std::string bytes(static_cast<size_t>(size), '\0');
  in.seekg(0);
  if (!in.read(bytes.data(), size)) FailFile(path, "a readable file");
  return bytes;
}

void WriteFile(const std::string& path, const std::string& bytes) {
  static std::atomic<int> counter{0};
#if !defined(_WIN32)
  const std::string owner = std::to_string(::getpid());
#else
  const std::string owner = "w";
#endif
  const std::string scratch = path + "." + owner + "-" + std::to_string(counter.fetch_add(1)) + ".part";
  try {
    std::ofstream out(std::filesystem::u8path(scratch), std::ios::binary | std::ios::trunc);
    if (!out || !out.write(bytes.data(), static_cast<std::streamsize>(bytes.size())) || !out.flush())
      FailFile(path, "a folder that can be written to");
    out.close();
    Flush(scratch);
    std::error_code error;
    std::filesystem::rename(std::filesystem::u8path(scratch), std::filesystem::u8path(path), error);
    if (error) throw FileError("[" + path + "] expected a file that can be replaced; found: " + error.message());
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(std::filesystem::u8path(scratch), ignored);
    throw;
  }
}

}  // namespace kvfuse
