// Tokens of PTX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fakecuda::ptx {

struct Token {
  std::string_view text;  // empty at the end of the module
  int line;
};

// Throws std::runtime_error, with the line and the text of a statement.
[[noreturn]] void fail_at(int line, const std::string& problem,
                          const std::string& text);

// Returns nothing if the text is no integer of 64 bits, with or without a sign.
std::optional<uint64_t> parse_integer(const std::string& text);

// Reads the tokens of a module in order. A word has letters, digits and the signs
// `_ $ % .`; a string has its quotes; every other sign is a token of its own.
class Lexer {
 public:
  explicit Lexer(std::string_view text);

  const Token& peek() const { return tokens_[next_]; }
  const Token& peek_second() const {
    return tokens_[next_ + (peek().text.empty() ? 0 : 1)];
  }
  Token take();
  bool take_if(std::string_view text);
  void expect(std::string_view text);
  std::string take_word();
  std::string take_value();  // a word, or a negative number
  uint64_t take_number();
  void skip_line();

  // Returns the source from the token `first` to the last one taken, on one line.
  std::string text_since(const Token& first) const;

 private:
  void add(std::string_view token, int line) { tokens_.push_back({token, line}); }

  std::vector<Token> tokens_;
  size_t next_ = 0;
};

}  // namespace fakecuda::ptx
