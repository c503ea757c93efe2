// Reads the arguments of host programs.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

// `count` values of a file, 16-byte aligned; null for "-".
template <class Value>
Value* read(const char* path, size_t count) {
    if (!std::strcmp(path, "-")) return nullptr;
    auto* data = static_cast<Value*>(std::aligned_alloc(16, (count * sizeof(Value) / 16 + 1) * 16));
    std::FILE* file = std::fopen(path, "rb");
    if (!file || std::fread(data, sizeof(Value), count, file) != count) std::exit(1);
    std::fclose(file);
    return data;
}
