// The program of a bundle on many command lines, for tests: a process is forked for each, so that one that dies or hangs
// takes no other with it, and libraries are loaded once.
//
//     harness SECONDS PATIENCE < cases     of CPU time, and of the clock, which a loaded machine may need more of
//
// A case is a line, its words apart by tabs. To each a line comes back: "exit CODE" or "signal NUMBER", a tab, and what it
// said on standard error, with a space for each new line and "?" for other control characters.
#define main attention_main
#include "main.cpp"
#undef main

#include <sys/resource.h>
#include <sys/wait.h>

#include <iostream>
#include <sstream>

namespace {

[[noreturn]] void child(const std::string& line, int said, unsigned seconds, unsigned patience) {
  std::vector<std::string> words = {"attention"};
  std::istringstream parts(line);
  for (std::string word; std::getline(parts, word, '\t');) words.push_back(word);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(&word[0]);
  pointers.push_back(nullptr);
  const int nowhere = open("/dev/null", O_RDWR);
  dup2(nowhere, 0), dup2(nowhere, 1), dup2(said, 2);
  const rlimit work = {seconds, seconds + 1};
  setrlimit(RLIMIT_CPU, &work);
  alarm(patience);
  const int code = attention_main(static_cast<int>(words.size()), pointers.data());
  std::fflush(stderr);
  _exit(code);
}

}  // namespace

int main(int, char** words) {
  std::ios::sync_with_stdio(false);
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  for (std::string line; std::getline(std::cin, line);) {
    int ends[2];
    if (pipe(ends)) return 1;
    const pid_t process = fork();
    if (process < 0) return 1;
    if (process == 0) child(line, ends[1], std::stoi(words[1]), std::stoi(words[2]));
    close(ends[1]);
    std::string said;
    char part[4096];
    for (ssize_t count; (count = read(ends[0], part, sizeof part)) > 0;)
      if (said.size() < 1 << 16) said.append(part, count);
    close(ends[0]);
    int status = 0;
    waitpid(process, &status, 0);
    for (char& letter : said)
      if (static_cast<unsigned char>(letter) < ' ') letter = letter == '\n' ? ' ' : '?';
    if (WIFEXITED(status)) std::cout << "exit " << WEXITSTATUS(status);
    else std::cout << "signal " << WTERMSIG(status);
    std::cout << '\t' << said << std::endl;
  }
  return 0;
}
