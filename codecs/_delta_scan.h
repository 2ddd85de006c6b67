/* Scans all elements of a block, 64 at a time. `_delta.c` includes this file once for each
 * instruction set, and defines before each include:
 *
 *     NAME(function)          the name of a function for this instruction set
 *     FOR                     the attribute that permits its instructions
 *     struct NAME(window)     the classes of 64 elements
 *     NAME(load)(&w, p, kind) determines these classes
 *     NAME(mask)(&w, c)       the elements of a class, one bit each
 *     NAME(differ)(p, q)      the elements that differ, one bit each
 *     NAME(nth)(mask, n)      the index of the nth bit that is set (n from 0)
 */

/* Count the elements of each class that differ; return the sum. */
FOR static size_t NAME(compare)(const struct pair *pair, int kind, uint32_t *counts) {
    size_t total = 0;
    for (size_t at = 0; at < pair->elements; at += WINDOW) {
        struct frame old, new;
        uint64_t differ = NAME(differ)(frame_of(&old, pair->base, at, pair->elements),
                                       frame_of(&new, pair->target, at, pair->elements));
        for (uint64_t left = differ; left; left &= left - 1) {
            counts[class_of(load16(pair->base + 2 * (at + lowest(left))), kind)]++;
            total++;
        }
    }
    return total;
}

/* Write the gap and step of each element that differs; those of class `c` begin at `begins[c]`. */
FOR static void NAME(changes)(const struct pair *pair, int kind, const struct classes *there, uint32_t *gaps, int32_t *steps) {
    uint32_t seen[CLASSES] = {0}, next[CLASSES] = {0}, put[CLASSES];
    memcpy(put, there->begins, sizeof put);
    for (size_t at = 0; at < pair->elements; at += WINDOW) {
        struct frame old, new;
        const uint8_t *base = frame_of(&old, pair->base, at, pair->elements);
        uint64_t masks[CLASSES], differ = NAME(differ)(base, frame_of(&new, pair->target, at, pair->elements));
        if (there->count > 1) {
            struct NAME(window) window;
            NAME(load)(&window, base, kind);
            for (int i = 0; i < there->count; i++) masks[there->which[i]] = NAME(mask)(&window, there->which[i]);
        } else {
            masks[there->which[0]] = ~(uint64_t)0;
            if (kind != INTEGER) {
                struct NAME(window) window;
                NAME(load)(&window, base, kind);
                masks[there->which[0]] = NAME(mask)(&window, there->which[0]);
            }
        }
        for (uint64_t left = differ; left; left &= left - 1) {
            size_t place = lowest(left), element = at + place;
            uint16_t u = load16(pair->base + 2 * element);
            int c = class_of(u, kind);
            uint32_t rank = seen[c] + (uint32_t)ones(masks[c] & (((uint64_t)1 << place) - 1));
            gaps[put[c]] = rank - next[c];
            steps[put[c]++] = key(load16(pair->target + 2 * element)) - key(u);
            next[c] = rank + 1;
        }
        for (int i = 0; i < there->count; i++) seen[there->which[i]] += (uint32_t)ones(masks[there->which[i]]);
    }
}

/* Scan a block, and count down each class's gap. Write the position and the step of each element
 * that differs; return how many there are. */
FOR static size_t NAME(find)(const uint8_t *base, size_t elements, int kind, struct counter *counters, int count,
                             uint32_t *positions, int32_t *found) {
    size_t put = 0;
    for (size_t at = 0; at < elements; at += WINDOW) {
        struct frame frame;
        struct NAME(window) window;
        NAME(load)(&window, frame_of(&frame, base, at, elements), kind);
        uint64_t valid = elements - at < WINDOW ? ((uint64_t)1 << (elements - at)) - 1 : ~(uint64_t)0;
        for (int i = 0; i < count; i++) {
            struct counter *counter = &counters[i];
            uint64_t mask = NAME(mask)(&window, counter->class_id) & valid;
            uint32_t here = (uint32_t)ones(mask);
            while (counter->left < here) {
                positions[put] = (uint32_t)(at + NAME(nth)(mask, counter->left));
                found[put++] = *counter->steps++;
                counter->left += ++counter->gaps == counter->end ? NEVER : 1 + *counter->gaps;
            }
            counter->left -= here;
        }
    }
    return put;
}

#undef NAME
#undef FOR
