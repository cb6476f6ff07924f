// What is known of the ranks that are missing when a collective of a process group fails.
#pragma once

#include <exception>
#include <string>

namespace parallel_ext {

// Returns in words who is missing in a group, by its name; empty if nothing is known.
using LostRanks = std::string (*)(const std::string& group_name);

// Lets errors of the process groups say who is missing; nullptr for none.
void set_lost_ranks(LostRanks lost_ranks);

// Throws the error of a collective of an op again, with the op and who is missing.
[[noreturn]] void throw_with_lost_ranks(const char* op, const std::string& group_name,
                                        const std::exception& error);

}  // namespace parallel_ext
