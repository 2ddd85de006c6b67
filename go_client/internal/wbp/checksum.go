package wbp

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
)

// castagnoli makes hash/crc32 use the CRC instructions of SSE 4.2 and ARM.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC32C returns the CRC-32C of a chunk.
func CRC32C(bytes []byte) uint32 { return crc32.Checksum(bytes, castagnoli) }

// Digest returns the digest of a version: the SHA-256 of its layout's id, its chunk size, and the
// checksums of its chunks.
func Digest(layoutID string, chunkBytes int64, crcs []uint32) string {
	id, _ := hex.DecodeString(layoutID)
	words := make([]byte, 8+4*len(crcs))
	binary.LittleEndian.PutUint64(words, uint64(chunkBytes))
	for i, crc := range crcs {
		binary.LittleEndian.PutUint32(words[8+4*i:], crc)
	}
	hash := sha256.New()
	hash.Write(id)
	hash.Write(words)
	return hex.EncodeToString(hash.Sum(nil))
}

// DigestOf returns the digest of a data section.
func DigestOf(layoutID string, data []byte, chunkBytes int64) string {
	return DigestWhile(layoutID, data, chunkBytes, func() bool { return true })
}

// DigestWhile returns the digest of a data section, or "" soon after wanted returns false.
func DigestWhile(layoutID string, data []byte, chunkBytes int64, wanted func() bool) string {
	plan := Plan{int64(len(data)), chunkBytes}
	crcs := make([]uint32, plan.Count())
	for i := range crcs {
		if !wanted() {
			return ""
		}
		begin, end := plan.Span(int64(i))
		crcs[i] = CRC32C(data[begin:end])
	}
	return Digest(layoutID, chunkBytes, crcs)
}

// A Plan divides a data section into chunks.
type Plan struct{ Bytes, ChunkBytes int64 }

// NewPlan returns a Plan, or an error if the protocol does not allow the chunk size.
func NewPlan(bytes, chunkBytes int64) (Plan, error) {
	if bytes < 0 || chunkBytes < 1 || chunkBytes > ChunkBytesMax {
		return Plan{}, fmt.Errorf("%d bytes in chunks of %d: a chunk has 1 to %d bytes", bytes, chunkBytes, ChunkBytesMax)
	}
	return Plan{bytes, chunkBytes}, nil
}

// Count returns the number of chunks.
func (p Plan) Count() int64 {
	count := p.Bytes / p.ChunkBytes
	if p.Bytes%p.ChunkBytes > 0 {
		count++
	}
	return count
}

// Span returns the byte range of a chunk.
func (p Plan) Span(index int64) (begin, end int64) {
	begin = index * p.ChunkBytes
	end = begin + p.ChunkBytes
	if end > p.Bytes {
		end = p.Bytes
	}
	return begin, end
}
