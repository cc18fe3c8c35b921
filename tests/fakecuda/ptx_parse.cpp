// Tokens, modules and kernels of PTX.
#include <algorithm>
#include <cctype>
#include <string_view>

#include "ptx.h"
#include "ptx_statement.h"

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

struct Token {
  std::string_view text;  // empty at the end of the module
  int line;
};

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

using Kernels = std::map<std::string, std::shared_ptr<const Kernel>>;

// Returns the decoder of a word such as "add.s32", or nullptr.
const Decode* decoder_of(const std::string& word) {
  static const Opcodes kAll = [] {
    Opcodes all = arithmetic_opcodes();
    all.merge(memory_opcodes());
    return all;
  }();
  auto found = kAll.find(word);
  if (found == kAll.end()) found = kAll.find(word.substr(0, word.find('.')));
  return found == kAll.end() ? nullptr : &found->second;
}

const Instruction* run_if_allowed(Thread& thread, const Instruction& i) {
  const bool allowed = thread.get<bool>(i.guard) != i.guard_negated;
  return allowed ? i.guarded(thread, i) : &i + 1;
}

// Parses the parameters, the registers and the instructions of a kernel.
class Body : public Symbols {
 public:
  Body(Lexer* lexer, Kernel* kernel, Program* program)
      : lexer_(lexer), kernel_(kernel), program_(program) {
    for (Slot axis = 0; axis < 3; ++axis) {
      const std::string suffix{'.', "xyz"[axis]};
      names_["%tid" + suffix] = {kThreadIndex + axis, 4, true};
      names_["%ctaid" + suffix] = {kBlockIndex + axis, 4, true};
      names_["%nctaid" + suffix] = {kGridSize + axis, 4, true};
    }
  }

  // Reads from the parameters to the closing brace.
  void parse() {
    lexer_->expect("(");
    while (!lexer_->take_if(")")) parameter();
    while (!lexer_->take_if("{")) launch_bound();
    statements();
    link();
  }

  Name find(const std::string& name) const override {
    const auto found = names_.find(name);
    return found == names_.end() ? Name{} : found->second;
  }

  Slot constant(uint64_t value) override {
    const auto [found, added] = constants_.emplace(value, program_->num_slots);
    if (added) program_->constants.emplace_back(program_->num_slots++, value);
    return found->second;
  }

 private:
  struct Jump {
    size_t from;
    std::string label;
    int line;
  };

  // Returns the bytes of the type that follows.
  uint64_t take_type() {
    const Token type = lexer_->take();
    const std::string name(type.text.substr(0, 1) == "." ? type.text.substr(1) : "");
    if (size_of(name) == 0) fail_at(type.line, "unknown type", std::string(type.text));
    return static_cast<uint64_t>(size_of(name));
  }

  // ".param .align 8 .b8 name[16]"
  void parameter() {
    lexer_->expect(".param");
    uint64_t alignment = lexer_->take_if(".align") ? lexer_->take_number() : 1;
    uint64_t nbytes = take_type();
    alignment = std::max(alignment, nbytes);
    const int line = lexer_->peek().line;
    const std::string name = lexer_->take_word();
    if (lexer_->take_if("[")) {
      nbytes *= lexer_->take_number();
      lexer_->expect("]");
    }
    const uint64_t end = kernel_->parameter_bytes + alignment - 1;
    const uint64_t offset = end / alignment * alignment;
    kernel_->parameters.push_back({offset, nbytes});
    kernel_->parameter_bytes = offset + nbytes;
    add_name(name, {constant(offset), 8, false}, line);
    lexer_->take_if(",");
  }

  void launch_bound() {
    const Token token = lexer_->take();
    if (token.text != ".maxntid" && token.text != ".minnctapersm") {
      fail_at(token.line, "unknown directive", std::string(token.text));
    }
    uint64_t product = 1;
    do {
      product *= lexer_->take_number();
    } while (lexer_->take_if(","));
    if (token.text == ".maxntid") kernel_->max_threads = product;
  }

  void statements() {
    int depth = 1;
    while (depth > 0) {
      const Token token = lexer_->peek();
      if (lexer_->take_if("{")) {
        ++depth;
      } else if (lexer_->take_if("}")) {
        --depth;
      } else if (lexer_->take_if(".reg")) {
        registers();
      } else if (lexer_->take_if(".pragma")) {
        lexer_->take();
        lexer_->expect(";");
      } else if (token.text.substr(0, 1) == ".") {
        fail_at(token.line, "unknown directive", std::string(token.text));
      } else if (lexer_->peek_second().text == ":") {
        const std::string label = lexer_->take_word();
        lexer_->expect(":");
        if (!labels_.emplace(label, program_->code.size()).second) {
          fail_at(token.line, "the label is not unique", label);
        }
      } else {
        instruction();
      }
    }
  }

  // ".reg .b32 %r<8>;"
  void registers() {
    const int nbytes = static_cast<int>(take_type());
    const int line = lexer_->peek().line;
    const std::string name = lexer_->take_word();
    lexer_->expect("<");
    const uint64_t count = lexer_->take_number();
    for (uint64_t each = 0; each < count; ++each) {
      add_name(name + std::to_string(each), {program_->num_slots++, nbytes, true},
               line);
    }
    lexer_->expect(">");
    lexer_->expect(";");
  }

  void add_name(const std::string& name, const Name& meaning, int line) {
    if (!names_.emplace(name, meaning).second) {
      fail_at(line, "the name is not unique", name);
    }
  }

  void instruction() {
    const Token first = lexer_->peek();
    Instruction made;
    const bool guarded = lexer_->take_if("@");
    if (guarded) guard(&made);
    const std::string word = lexer_->take_word();
    std::vector<Operand> operands;
    while (!lexer_->take_if(";")) {
      operands.push_back(operand());
      if (!lexer_->take_if(",") && lexer_->peek().text != ";") lexer_->expect(";");
    }
    const std::string text = lexer_->text_since(first);
    const Decode* const decode = decoder_of(word);
    if (decode == nullptr) fail_at(first.line, "unknown instruction", text);
    Statement statement(word, operands, this, text, first.line);
    (*decode)(statement, &made);
    if (statement.opcode() == "bra") {
      jumps_.push_back({program_->code.size(), operands[0].text, first.line});
    }
    if (guarded) {
      made.guarded = made.run;
      made.run = &run_if_allowed;
    }
    program_->code.push_back(made);
    program_->texts.push_back(text);
  }

  void guard(Instruction* made) {
    made->guard_negated = lexer_->take_if("!");
    const int line = lexer_->peek().line;
    const std::string name = lexer_->take_word();
    const Name found = find(name);
    if (found.nbytes != 1) fail_at(line, "the guard must be a predicate", name);
    made->guard = found.slot;
  }

  Operand operand() {
    Operand made;
    if (lexer_->take_if("{")) {
      do {
        made.items.push_back(operand());
      } while (lexer_->take_if(","));
      lexer_->expect("}");
      return made;
    }
    made.is_address = lexer_->take_if("[");
    made.text = lexer_->take_value();
    if (!made.is_address) return made;
    if (lexer_->take_if("+")) {
      const bool negative = lexer_->take_if("-");
      const auto offset = static_cast<int64_t>(lexer_->take_number());
      made.offset = negative ? -offset : offset;
    }
    lexer_->expect("]");
    return made;
  }

  // Adds the end of the kernel and sets the distances of branches.
  void link() {
    Instruction last;
    Statement statement("ret", {}, this, "ret;", 0);
    (*decoder_of("ret"))(statement, &last);
    program_->code.push_back(last);
    program_->texts.push_back("ret;");
    for (const Jump& jump : jumps_) {
      const auto found = labels_.find(jump.label);
      if (found == labels_.end()) fail_at(jump.line, "unknown label", jump.label);
      program_->code[jump.from].offset =
          static_cast<int64_t>(found->second) - static_cast<int64_t>(jump.from);
    }
  }

  Lexer* lexer_;
  Kernel* kernel_;
  Program* program_;
  std::unordered_map<std::string, Name> names_;
  std::unordered_map<uint64_t, Slot> constants_;
  std::unordered_map<std::string, size_t> labels_;
  std::vector<Jump> jumps_;
};

}  // namespace

Kernels parse(const std::string& text) {
  Lexer lexer(text);
  Kernels kernels;
  while (!lexer.peek().text.empty()) {
    const Token token = lexer.take();
    if (token.text == ".version" || token.text == ".target") {
      lexer.skip_line();
    } else if (token.text == ".address_size") {
      if (lexer.take_number() != 64) {
        fail_at(token.line, "addresses must have 64 bits", "");
      }
    } else if (token.text == ".entry") {
      auto kernel = std::make_shared<Kernel>();
      auto program = std::make_shared<Program>();
      kernel->name = lexer.take_word();
      Body(&lexer, kernel.get(), program.get()).parse();
      kernel->program = std::move(program);
      kernels[kernel->name] = std::move(kernel);
    } else {
      fail_at(token.line, "unknown directive", std::string(token.text));
    }
  }
  return kernels;
}

}  // namespace fakecuda::ptx
