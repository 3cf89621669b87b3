#pragma once

// Rows in lanes, in tiles of 16 rows and 32 columns: step t of a tile holds the t-th nonzero of
// every row that has one. Smaller and faster than a bitmap where most values are zero. Sections:
//   groups: for each 16 rows where their entries and their steps start (pairs), and the end;
//   masks: u16 a step: bit r = row r of the group has an entry;
//   indices: u8 an entry, step after step, by row: the low 5 bits are the column within the tile.
//     The upper bits of a step's first index say by how many tiles it lies further than the step
//     before (a group begins at tile 0), those of its others are zero;
//   values: the weight's bits, as the indices.
// Empty tiles have no steps. Steps more than 7 tiles apart have padding steps in between, each 7
// tiles further than the one before: one entry, of row 0 and the tile's first column, whose value
// is +0.0. extent[0] is the number of steps, extent[1] that of entries.

#include "format/format.h"

namespace fxsparse {

extern const Format kTilesFormat;

constexpr int kTilesGroups = 0;
constexpr int kTilesMasks = 1;
constexpr int kTilesIndices = 2;
constexpr int kTilesValues = 3;
constexpr int kTilesSections = 4;

constexpr int kTileRowsLog2 = 4;
constexpr int kTileColsLog2 = 5;
constexpr int kTileCols = 1 << kTileColsLog2;
constexpr int kMostAdvance = 7;  // tiles

// How many steps and entries a weight takes.
void tiles_measure(const DenseView& dense, uint64_t* steps, uint64_t* entries);
void tiles_pack(const DenseView& dense, const Header& header, uint8_t* out);

}  // namespace fxsparse
