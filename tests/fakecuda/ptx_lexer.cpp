#include "ptx_lexer.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>

namespace fakecuda::ptx {
namespace {

bool is_word_sign(char sign) {
  return std::isalnum(static_cast<unsigned char>(sign)) || sign == '_' || sign == '$' ||
         sign == '%' || sign == '.';
}

// Returns the number of signs of the word that `text` begins with.
size_t word_length(std::string_view text) {
  return static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_word_sign) -
                             text.begin());
}

}  // namespace

void fail_at(int line, const std::string& problem, const std::string& text) {
  throw std::runtime_error("PTX line " + std::to_string(line) + ": " + problem +
                           (text.empty() ? "" : ": " + text));
}

std::optional<uint64_t> parse_integer(const std::string& text) {
  const bool negative = text[0] == '-';
  char* end = nullptr;
  errno = 0;
  const uint64_t value =
      negative ? static_cast<uint64_t>(std::strtoll(text.c_str(), &end, 0))
               : std::strtoull(text.c_str(), &end, 0);
  if (text.empty() || *end != 0 || errno != 0) return {};
  return value;
}

Lexer::Lexer(std::string_view text) {
  int line = 1;
  size_t at = 0;
  while (at < text.size()) {
    const std::string_view rest = text.substr(at);
    size_t length = 1;
    if (rest.substr(0, 2) == "//") {
      length = std::min(rest.find('\n'), rest.size());
    } else if (!std::isspace(static_cast<unsigned char>(rest[0]))) {
      length = std::max<size_t>(word_length(rest), 1);
      if (rest[0] == '"') length = std::min(rest.find('"', 1), rest.size() - 1) + 1;
      add(rest.substr(0, length), line);
    }
    line += static_cast<int>(std::count(rest.begin(), rest.begin() + length, '\n'));
    at += length;
  }
  add(text.substr(text.size()), line);
}

Token Lexer::take() {
  const Token token = peek();
  if (!token.text.empty()) ++next_;
  return token;
}

bool Lexer::take_if(std::string_view text) {
  if (peek().text != text) return false;
  take();
  return true;
}

void Lexer::expect(std::string_view text) {
  const Token token = take();
  if (token.text == text) return;
  const std::string found = token.text.empty() ? "the end" : std::string(token.text);
  fail_at(token.line, "expected " + std::string(text) + ", but found " + found, "");
}

std::string Lexer::take_word() {
  const Token token = take();
  if (word_length(token.text) > 0) return std::string(token.text);
  fail_at(token.line, "expected a word", std::string(token.text));
}

std::string Lexer::take_value() {
  const bool negative = take_if("-");
  return (negative ? "-" : "") + take_word();
}

uint64_t Lexer::take_number() {
  const int line = peek().line;
  const std::string word = take_word();
  const auto value = parse_integer(word);
  if (!value) fail_at(line, "expected an integer", word);
  return *value;
}

void Lexer::skip_line() {
  const int line = peek().line;
  while (!peek().text.empty() && peek().line == line) take();
}

std::string Lexer::text_since(const Token& first) const {
  const char* const begin = first.text.data();
  const std::string_view last = tokens_[next_ - 1].text;
  std::string text;
  for (const char* at = begin; at < last.data() + last.size(); ++at) {
    const bool space = std::isspace(static_cast<unsigned char>(*at));
    if (!space) text += *at;
    if (space && !text.empty() && text.back() != ' ') text += ' ';
  }
  return text;
}

}  // namespace fakecuda::ptx
